// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Realization is the way in which a plan is passed to an engine.
type Realization string

const (
	// EngineMap passes the plan as the engine's expert map.
	EngineMap Realization = "EngineMap"
	// ReshuffledWeights passes the plan as a checkpoint with experts and gate rows in the plan's order.
	ReshuffledWeights Realization = "ReshuffledWeights"
)

// Situation contains everything that determines whether an engine can serve under a plan, and whether the plan has a
// benefit.
type Situation struct {
	Realization Realization
	// Release is the engine's release. The zero value means unknown; limitations of releases are then not refused.
	Release Release
	// Launch contains the start parameters of the engine. Support adds the parameters of the realization.
	Launch Launch
	// UserArgs are the user's flags for the engine. UserEnv are the user's environment variables, as UserVariables returns
	// them.
	UserArgs, UserEnv []string
	// Family is the model_type of the language model, Wrapper that of a multimodal wrapper around it, Quantization the
	// checkpoint's method as reported by the inspection, such as fp8 or modelopt/NVFP4. Empty means none. An empty
	// Family is not known yet and excludes nothing.
	Family, Wrapper, Quantization string
	// Groups is the number of groups of a group-limited gate, and 1 (or 0) for other gates. KeepsGroups reports whether
	// the plan maps groups onto groups.
	Groups      int
	KeepsGroups bool
	// Unmappable is the reason why the model cannot be served with an expert map, and Unpermutable the reason why the
	// experts of its checkpoint cannot be permuted. Each is empty if there is none, or if that is unknown.
	Unmappable, Unpermutable string
}

// UserVariables returns environment variables as NAME=VALUE, or as NAME if only the pod knows the value.
func UserVariables(env []corev1.EnvVar) []string {
	var variables []string
	for _, variable := range env {
		text := variable.Name
		if variable.ValueFrom == nil && !strings.Contains(variable.Value, "$(") {
			text += "=" + variable.Value
		}
		variables = append(variables, text)
	}
	return variables
}

// given reports whether a variable is set, in a list as UserVariables returns it.
func given(variables []string, name string) bool {
	return slices.ContainsFunc(variables, func(variable string) bool { return variable == name || strings.HasPrefix(variable, name+"=") })
}

// Sets reports whether the user sets an environment variable.
func (s Situation) Sets(name string) bool { return given(s.UserEnv, name) }

// Value returns the value of an environment variable that the user sets, and whether it is known. The last variable of a
// name counts, as in a container.
func (s Situation) Value(name string) (value string, known bool) {
	for _, variable := range s.UserEnv {
		if of, v, isKnown := strings.Cut(variable, "="); of == name {
			value, known = v, isKnown
		}
	}
	return value, known
}

// Finding is the reason for a refusal or a warning, as the reason and message of a condition.
type Finding struct{ Reason, Message string }

// Support is the verdict on a plan for an engine. Without refusals, the engine can serve under the plan; warnings
// describe limitations.
type Support struct{ Refusals, Warnings []Finding }

// Refuse adds a refusal.
func (s *Support) Refuse(reason, format string, args ...any) {
	s.Refusals = append(s.Refusals, Finding{reason, fmt.Sprintf(format, args...)})
}

// Warn adds a warning.
func (s *Support) Warn(reason, format string, args ...any) {
	s.Warnings = append(s.Warnings, Finding{reason, fmt.Sprintf(format, args...)})
}

// Support returns whether the engine can serve under a plan with the situation's realization.
func (a Adapter) Support(s Situation) Support {
	var verdict Support
	launch := s.Launch
	switch s.Realization {
	case EngineMap:
		if a.ExpertMap == nil {
			verdict.Refuse("ExpertMapUnsupported", "%s reads no expert map: use %s", a.Type, ReshuffledWeights)
			return verdict
		}
		launch.ExpertMap = a.ExpertMap.File
		if s.Unmappable != "" {
			verdict.Refuse("ModelNotMappable", "The model cannot be served with an expert map: %s", s.Unmappable)
		}
	case ReshuffledWeights:
		launch.Reshuffled = true
		a.checkPermutation(s, &verdict)
	default:
		verdict.Refuse("UnknownRealization", "%q is not a supported realization: use %s or %s", s.Realization, EngineMap, ReshuffledWeights)
		return verdict
	}
	s.Launch = launch
	if launch.Ranks < 2 {
		verdict.Refuse("SingleRank", "spec.parallelism.expertParallelSize is %d: on one rank, every expert is local with any placement", launch.Ranks)
	}
	if err := a.CheckExchange(launch); err != nil {
		verdict.Refuse(ReasonNoAllToAll, "%v", err)
	}
	if _, err := a.Args(launch, s.UserArgs); err != nil {
		verdict.Refuse("ContradictingFlags", "%v", err)
	}
	if err := a.ValidateOptions(launch); err != nil {
		verdict.Refuse("ContradictingFlags", "%v", err)
	}
	if err := a.CheckEnv(launch, "spec.engine.env", s.UserEnv); err != nil {
		verdict.Refuse("ContradictingFlags", "%v", err)
	}
	checkAccess(s, &verdict)
	if a.Check != nil {
		a.Check(s, &verdict)
	}
	if a.CheckStart != nil {
		a.CheckStart(s, &verdict)
	}
	a.checkNewest(s, &verdict)
	return verdict
}

// checkPermutation checks the limitations of permuted checkpoints that apply to all engines.
func (a Adapter) checkPermutation(s Situation, verdict *Support) {
	if s.Unpermutable != "" {
		verdict.Refuse("CheckpointNotPermutable", "The experts of the checkpoint cannot be permuted: %s", s.Unpermutable)
	}
	if err := CheckExternalExperts(s.UserArgs); err != nil {
		verdict.Refuse("ExternalExperts", "%v", err)
	}
	if s.Launch.RedundantExperts > 0 {
		verdict.Refuse("RedundantExpertsUnsupported", "The plan has %d redundant experts per layer, but a permuted checkpoint contains each expert once: use %s, or a plan without redundant experts", s.Launch.RedundantExperts, EngineMap)
	}
	if s.Groups > 1 && !s.KeepsGroups {
		verdict.Refuse("GroupLimitedGate", "The model's gate first selects among %d groups of experts, which the plan does not preserve: a permuted checkpoint would compute different outputs. Solve a plan that preserves groups, or use %s", s.Groups, EngineMap)
	}
	if !a.CanPinRank() {
		verdict.Refuse("RankPinningUnsupported", "Requests cannot be pinned to a rank of %s: a permuted checkpoint has no benefit", a.Type)
	}
}

// ReasonNoAllToAll is the reason when locality has no benefit. It is a refusal with tensor-parallel attention, and a
// warning with data-parallel attention.
const ReasonNoAllToAll = "NoAllToAll"

const (
	// ReasonUnprovenMap is the reason when an engine loads experts by a map but selects, or may select, experts without
	// it.
	ReasonUnprovenMap = "UnprovenMap"
	// ReasonExpertMapWithoutEffect is the reason when a map has no effect.
	ReasonExpertMapWithoutEffect = "ExpertMapWithoutEffect"
	// ReasonCapture is the reason when an engine cannot return routed experts with the given configuration.
	ReasonCapture = "CaptureUnsupported"
	// ReasonDraftModelExperts is the reason for the effect of a map on the layers of a draft model.
	ReasonDraftModelExperts = "DraftModelExperts"
)

// NoAllToAll adds the finding that an engine exchanges tokens by a collective of all ranks. With tensor-parallel
// attention, every rank already has every token, and a plan has no benefit. The advice is a sentence without the final
// full stop.
func (s *Support) NoAllToAll(launch Launch, flag, value, advice string) {
	given := fmt.Sprintf("spec.engine.args has no %s", flag)
	if value != "" {
		given = fmt.Sprintf("spec.engine.args sets %s %s", flag, value)
	}
	if !launch.AttentionDP {
		s.Refuse(ReasonNoAllToAll, "%s, and spec.parallelism.attention is TensorParallel: without an all-to-all backend every rank has every token, and a plan saves nothing. %s", given, advice)
		return
	}
	s.Warn(ReasonNoAllToAll, "%s: without an all-to-all backend every rank takes part in the exchange of every token, and locality saves little. %s", given, advice)
}

// ModelOpt reports whether a checkpoint was quantised by ModelOpt, or to NVFP4 by any method.
func (s Situation) ModelOpt() bool {
	method := strings.ToLower(s.Quantization)
	return strings.Contains(method, "modelopt") || strings.Contains(method, "nvfp4")
}
