package engine

import (
	"fmt"
	"strings"
)

// Realization is how a plan reaches an engine.
type Realization string

const (
	// EngineMap gives the engine its own expert map.
	EngineMap Realization = "EngineMap"
	// ReshuffledWeights gives it a checkpoint whose experts and gate rows stand in the plan's order.
	ReshuffledWeights Realization = "ReshuffledWeights"
)

// Situation is all that decides whether an engine can serve under a plan, and whether that is of use.
type Situation struct {
	Realization Realization
	// Release is that of the engine; its zero value where it is not known, which refuses nothing.
	Release Release
	// Launch is what the engine is started with; Support itself adds what the realisation adds.
	Launch Launch
	// UserArgs are the user's flags of the engine, UserEnv the names of the user's environment variables.
	UserArgs, UserEnv []string
	// Family is the model_type of the language model, Wrapper that of a multimodal wrapper around it, Quantization the
	// checkpoint's method as inspection spells it, such as fp8 or modelopt/NVFP4; empty for none. An empty Family is
	// one that is not known yet: it rules nothing out.
	Family, Wrapper, Quantization string
	// Groups is the number of groups of a group-limited gate, 1 (or 0) elsewhere; KeepsGroups tells that the plan maps
	// groups onto groups.
	Groups      int
	KeepsGroups bool
	// Unpermutable is why the experts of the checkpoint cannot be put into another order; empty where they can, or where that is not known.
	Unpermutable string
}

// Finding is why something is refused, or what to mind about it: a condition's reason and message.
type Finding struct{ Reason, Message string }

// Support is what an engine can make of a plan. Without refusals it serves under it; warnings say what it may lack then.
type Support struct{ Refusals, Warnings []Finding }

// Refuse adds a refusal.
func (s *Support) Refuse(reason, format string, args ...any) {
	s.Refusals = append(s.Refusals, Finding{reason, fmt.Sprintf(format, args...)})
}

// Warn adds a warning.
func (s *Support) Warn(reason, format string, args ...any) {
	s.Warnings = append(s.Warnings, Finding{reason, fmt.Sprintf(format, args...)})
}

// Support tells whether the engine can serve under a plan by the situation's realisation.
func (a Adapter) Support(s Situation) Support {
	var verdict Support
	launch := s.Launch
	switch s.Realization {
	case EngineMap:
		if a.ExpertMap == nil {
			verdict.Refuse("ExpertMapUnsupported", "%s reads no expert map: the plan can reach it by %s only", a.Type, ReshuffledWeights)
			return verdict
		}
		launch.ExpertMap = a.ExpertMap.File
	case ReshuffledWeights:
		launch.Reshuffled = true
		a.checkPermutation(s, &verdict)
	default:
		verdict.Refuse("UnknownRealization", "%q is no way to realise a plan: use %s or %s", s.Realization, EngineMap, ReshuffledWeights)
		return verdict
	}
	s.Launch = launch
	if launch.Ranks < 2 {
		verdict.Refuse("SingleRank", "spec.parallelism.expertParallelSize is %d: on one rank every expert is local, whatever the placement", launch.Ranks)
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
	if a.Check != nil {
		a.Check(s, &verdict)
	}
	if a.CheckStart != nil {
		a.CheckStart(s, &verdict)
	}
	a.checkNewest(s, &verdict)
	return verdict
}

// checkPermutation checks what holds of a permuted checkpoint in any engine.
func (a Adapter) checkPermutation(s Situation, verdict *Support) {
	if s.Unpermutable != "" {
		verdict.Refuse("CheckpointNotPermutable", "The checkpoint's experts cannot be put into a plan's order: %s", s.Unpermutable)
	}
	if err := CheckExternalExperts(s.UserArgs); err != nil {
		verdict.Refuse("ExternalExperts", "%v", err)
	}
	if s.Launch.RedundantExperts > 0 {
		verdict.Refuse("RedundantExpertsUnsupported", "The plan has %d redundant experts in each layer; a permuted checkpoint has each expert once: use %s, or a plan without them", s.Launch.RedundantExperts, EngineMap)
	}
	if s.Groups > 1 && !s.KeepsGroups {
		verdict.Refuse("GroupLimitedGate", "The model's gate chooses among %d groups of experts, and the plan does not map groups onto groups: a permuted checkpoint would compute something else. Solve a plan that preserves groups, or use %s", s.Groups, EngineMap)
	}
	if !a.Pins() {
		verdict.Refuse("RankPinningUnsupported", "Requests cannot be sent to a rank of %s: a permuted checkpoint gains nothing there", a.Type)
	}
}

// ReasonNoAllToAll is that locality cannot pay: a refusal where attention is tensor parallel, else a warning.
const ReasonNoAllToAll = "NoAllToAll"

const (
	// ReasonUnprovenMap is that an engine loads experts by a map, and chooses them without it, or may.
	ReasonUnprovenMap = "ExpertMapUnverified"
	// ReasonMapWithoutEffect is that a map changes nothing.
	ReasonMapWithoutEffect = "ExpertMapWithoutEffect"
	// ReasonDraftExperts is what a map does to the layers of a draft model.
	ReasonDraftExperts = "DraftModelExperts"
)

// NoAllToAll tells that an engine exchanges tokens by a collective of all ranks. With attention tensor parallelism these have every token
// already, and a plan has nothing to save. The advice is a sentence without its full stop.
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

// ModelOpt tells that a checkpoint was quantised by ModelOpt, or to NVFP4 by any method.
func (s Situation) ModelOpt() bool {
	method := strings.ToLower(s.Quantization)
	return strings.Contains(method, "modelopt") || strings.Contains(method, "nvfp4")
}
