// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/model/family"
)

// of returns what SGLang supports for a model type. The zero value is that of an unknown type.
func of(modelType string) family.SGLang {
	if f := family.Lookup(modelType); f != nil {
		return f.SGLang
	}
	return family.SGLang{}
}

// The releases in which the checked behaviour changed.
var (
	// staticExits is the first release that exits at startup with --ep-dispatch-algorithm static and no all-to-all
	// backend. Earlier releases compute wrong outputs (sgl-project/sglang#32962).
	staticExits = engine.Release{Minor: 5, Patch: 17}
	// mapAlwaysUsed is the first release that selects experts by the map with every backend, and without one.
	mapAlwaysUsed = engine.Release{Minor: 5, Patch: 23}
)

// backend is an all-to-all backend and the first release in which a model selects experts by the map with it. The zero
// release means all releases that were read.
type backend struct {
	name  string
	first engine.Release
}

// since returns backends with the same first release.
func since(first engine.Release, names ...string) []backend {
	var all []backend
	for _, name := range names {
		all = append(all, backend{name, first})
	}
	return all
}

// The all-to-all backends with which releases before mapAlwaysUsed select experts by the map, by the block of experts
// that families share. With any other backend, these releases load experts by the map and select experts without it.
var (
	deepseekBlock = slices.Concat(since(engine.Release{}, "deepep", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer"), since(engine.Release{Minor: 5, Patch: 19}, "deepep_v2"))
	glmBlock      = since(engine.Release{}, "deepep", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer")
	qwen3Block    = slices.Concat(since(engine.Release{}, "deepep", "ascend_fuseep"), since(engine.Release{Minor: 5, Patch: 18}, "mooncake", "mori", "pplx"),
		since(engine.Release{Minor: 5, Patch: 19}, "deepep_v2"), since(engine.Release{Minor: 5, Patch: 21}, "megamoe"))
	qwen2Block = slices.Concat(since(engine.Release{}, "deepep"), since(engine.Release{Minor: 5, Patch: 18}, "mori"),
		since(engine.Release{Minor: 5, Patch: 19}, "deepep_v2"), since(engine.Release{Minor: 5, Patch: 21}, "megamoe"))

	mapBackends = map[string][]backend{
		family.DeepSeekBlock: deepseekBlock, family.GLMBlock: glmBlock, family.Qwen2Block: qwen2Block, family.Qwen3Block: qwen3Block,
	}
)

// usesMap reports whether a release before mapAlwaysUsed, or an unknown release, selects the experts of a family by the
// map with an all-to-all backend. For an unknown family, it reports whether any family does.
func usesMap(modelType, name string, release engine.Release) bool {
	for block, backends := range mapBackends {
		if modelType != "" && of(modelType).Block != block {
			continue
		}
		if slices.ContainsFunc(backends, func(b backend) bool { return b.name == name && !release.Before(b.first) }) {
			return true
		}
	}
	return false
}

// adviceDeepEP is the advice for a missing all-to-all backend.
const adviceDeepEP = "Set --moe-a2a-backend, for example to deepep"

// check adds the limitations of SGLang's expert maps and its recorder.
func check(s engine.Situation, verdict *engine.Support) {
	name, _ := engine.FlagValue(s.UserArgs, "--moe-a2a-backend")
	allToAll := name != "" && name != "none"
	if !allToAll {
		advice := adviceDeepEP
		if of(s.Family).MapWithoutEffect {
			advice = fmt.Sprintf("The checked releases of SGLang cannot run %s models with deepep", s.Family)
		}
		verdict.NoAllToAll(s.Launch, "--moe-a2a-backend", name, advice)
	}
	if s.Realization == engine.EngineMap {
		checkMap(s, name, allToAll, verdict)
	}
	mode, _ := engine.FlagValue(s.UserArgs, "--deepep-mode")
	if (mode == "" || mode == "auto") && allToAll && recordsDistribution(s.UserArgs) {
		verdict.Warn("RecorderNeedsDeepEPMode", "spec.engine.args records the distribution of experts, which fails with --deepep-mode auto: set --deepep-mode to normal or low_latency, or remove the recorder")
	}
}

func checkMap(s engine.Situation, name string, allToAll bool, verdict *engine.Support) {
	wrapper, first := family.SGLangWrappers[s.Wrapper], of(s.Family).ReadsMap
	if wrapper > first {
		first = wrapper
	}
	switch {
	case s.Wrapper != "" && wrapper == "":
		verdict.Refuse("ExpertMapIgnored", "SGLang ignores an expert map for multimodal models of type %q: use %s", s.Wrapper, engine.ReshuffledWeights)
		return
	case s.Family != "" && of(s.Family).ReadsMap == "":
		verdict.Refuse("ExpertMapIgnored", "SGLang ignores an expert map for models of type %q: use %s", s.Family, engine.ReshuffledWeights)
		return
	case s.Family != "" && first > family.OldestSGLang && s.Release.Before(engine.ParseRelease(first)):
		verdict.Refuse("ExpertMapIgnored", "The source of SGLang %s was not checked for expert maps of models of type %q: use %s or newer, or %s", s.Release, s.Family, first, engine.ReshuffledWeights)
		return
	case s.ModelOpt():
		verdict.Refuse("QuantizedScales", "SGLang loads the scales of a checkpoint quantised by %s in the default order of experts, regardless of the map: use %s", s.Quantization, engine.ReshuffledWeights)
		return
	case of(s.Family).MapWithoutEffect:
		verdict.Warn(engine.ReasonExpertMapWithoutEffect, "The checked releases of SGLang load the experts of %s models in the default order, regardless of the map: outputs are correct, but locality does not improve. Use %s", s.Family, engine.ReshuffledWeights)
		return
	}
	if s.Launch.RedundantExperts > 0 && !allToAll {
		verdict.Refuse(engine.ReasonNoAllToAll, "spec.placement.redundantExperts needs an all-to-all backend: SGLang before %s computes wrong outputs without one, and later releases exit at startup. "+
			"Set --moe-a2a-backend, for example to deepep, or remove redundantExperts", staticExits)
	} else {
		checkDispatch(s, name, allToAll, verdict)
	}
	if algorithm, _ := engine.FlagValue(s.UserArgs, "--speculative-algorithm"); usesDraftModel(algorithm) {
		verdict.Warn(engine.ReasonDraftModelExperts, "With --speculative-algorithm %s, SGLang loads the experts of a draft layer by the map of a layer of the model, and may select experts without it. "+
			"Outputs are correct, but sglang:spec_accept_length may drop: compare it, or use %s", algorithm, engine.ReshuffledWeights)
	}
}

// checkDispatch refuses a map that is used to load experts but not to select them. For an unknown release, it adds a
// warning.
func checkDispatch(s engine.Situation, name string, allToAll bool, verdict *engine.Support) {
	if s.Release.AtLeast(mapAlwaysUsed) || allToAll && usesMap(s.Family, name, s.Release) {
		return
	}
	given := "without --moe-a2a-backend"
	if allToAll {
		given = "with --moe-a2a-backend " + name
	}
	models := "models"
	if s.Family != "" {
		models = fmt.Sprintf("models of type %s", s.Family)
	}
	wrong := fmt.Sprintf("SGLang before %s loads the experts of %s by the map and selects experts without it, %s: outputs are wrong (sgl-project/sglang#36861). Use %s, or an all-to-all backend. %s",
		mapAlwaysUsed, models, given, engine.ReshuffledWeights, adviceDeepEP)
	if !s.Release.Known() {
		verdict.Warn(engine.ReasonUnprovenMap, "The release of SGLang is unknown until a pod reports it. %s", wrong)
		return
	}
	verdict.Refuse(engine.ReasonUnprovenMap, "%s", wrong)
}

// usesDraftModel reports whether an algorithm of speculative decoding uses a draft model. The other algorithms draft
// from text.
func usesDraftModel(algorithm string) bool {
	return algorithm != "" && !strings.EqualFold(algorithm, "NGRAM") && !strings.EqualFold(algorithm, "NONE")
}

// checkStart refuses a release that lacks a feature required by the spec, and adds a warning for a model with which the
// engine may exit at startup if it returns routed experts.
func checkStart(s engine.Situation, verdict *engine.Support) {
	if s.Launch.RoutedExperts || s.Launch.HasPlan() {
		verdict.NeedsRelease(s, "SGLang", "spec.profiling, spec.placement.planRef and spec.routing.samplePercent", minimum, "requests for a rank and their routed experts",
			"remove profiling and planRef, and set samplePercent to 0")
	}
	if name := of(s.Family).ExpertsPerToken; s.Launch.RoutedExperts && name != "" {
		verdict.Warn(engine.ReasonCapture, "SGLang exits at startup with --enable-return-routed-experts, which spec.profiling and spec.routing.samplePercent need, if config.json of the %s model has %s but not num_experts_per_tok. "+
			"Add num_experts_per_tok with the same value, or set samplePercent to 0 and spec.profiling.backend to Transformers", s.Family, name)
	}
}

// recordsDistribution reports whether the engine's recorder runs in a mode that sums over ranks.
func recordsDistribution(args []string) bool {
	mode, _ := engine.FlagValue(args, "--expert-distribution-recorder-mode")
	_, metrics := engine.FlagValue(args, "--enable-expert-distribution-metrics")
	report, balancedness := engine.FlagValue(args, "--expert-balancedness-report-mode")
	return mode == "stat" || metrics || balancedness && report != "off"
}
