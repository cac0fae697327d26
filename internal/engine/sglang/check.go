package sglang

import (
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/engine"
)

// located are the families whose models tell the engine where their experts are (get_model_config_for_expert_location). In
// any other --init-expert-location is silently without effect.
var located = []string{"deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "kimi_k2", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text"}

// locatedWrappers are the multimodal wrappers that do: SGLang asks the outermost model alone.
var locatedWrappers = []string{"dots_vlm", "kimi_k25", "qwen3_vl_moe"}

// unmoved are the families whose experts SGLang loads in the default order whatever the map, and whose models it cannot run with DeepEP, by
// the source of releases.
var unmoved = []string{"gpt_oss"}

// unrouted are the families whose experts are loaded by the map and then chosen without it where no all-to-all backend is set, by the
// source of releases.
var unrouted = []string{"qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text"}

// setDeepEP is what to do about an all-to-all backend that is missing.
const setDeepEP = "Set --moe-a2a-backend, for example to deepep"

// check knows what SGLang's maps and recorder cannot do.
func check(s engine.Situation, verdict *engine.Support) {
	backend, _ := engine.FlagValue(s.UserArgs, "--moe-a2a-backend")
	allToAll := backend != "" && backend != "none"
	if !allToAll {
		advice := setDeepEP
		if slices.Contains(unmoved, s.Family) {
			advice = fmt.Sprintf("The releases of SGLang whose source is known cannot run %s models with deepep", s.Family)
		}
		verdict.NoAllToAll(s.Launch, "--moe-a2a-backend", backend, advice)
	}
	if s.Realization == engine.EngineMap {
		checkMap(s, allToAll, verdict)
	}
	mode, _ := engine.FlagValue(s.UserArgs, "--deepep-mode")
	if (mode == "" || mode == "auto") && allToAll && recordsDistribution(s.UserArgs) {
		verdict.Warn("RecorderNeedsMode", "spec.engine.args records the distribution of experts, which fails with --deepep-mode auto: set --deepep-mode to normal or low_latency, or remove the recorder")
	}
}

func checkMap(s engine.Situation, allToAll bool, verdict *engine.Support) {
	switch {
	case s.Family == "":
		if !allToAll {
			warnUnproven(strings.Join(unrouted, ", "), verdict)
		}
	case s.Wrapper != "" && !slices.Contains(locatedWrappers, s.Wrapper):
		verdict.Refuse("NoExpertLocation", "SGLang ignores an expert map for multimodal models of type %q: the plan can reach it by %s only", s.Wrapper, engine.ReshuffledWeights)
	case !slices.Contains(located, s.Family):
		verdict.Refuse("NoExpertLocation", "SGLang ignores an expert map for models of type %q: the plan can reach it by %s only", s.Family, engine.ReshuffledWeights)
	case s.ModelOpt():
		verdict.Refuse("QuantizedScales", "SGLang loads the scales of a checkpoint quantised by %s in the default order of experts, whatever the map: the plan can reach it by %s only", s.Quantization, engine.ReshuffledWeights)
	case slices.Contains(unmoved, s.Family):
		verdict.Warn("MapWithoutEffect", "The releases of SGLang whose source is known load the experts of %s models in the default order, whatever the map: answers stay right, and nothing is gained. %s moves them", s.Family, engine.ReshuffledWeights)
	case slices.Contains(unrouted, s.Family) && !allToAll:
		warnUnproven(s.Family, verdict)
	}
}

// warnUnproven warns that releases ignore the map for models of a family, or of one of several while the model is not
// inspected yet.
func warnUnproven(families string, verdict *engine.Support) {
	verdict.Warn("UnprovenMap", "Without an all-to-all backend, the releases of SGLang whose source is known load the experts of "+
		"models of type %s by the map, and then ignore the map (sgl-project/sglang#36861): only the lossless probe can find out. %s",
		families, setDeepEP)
}

// recordsDistribution tells that the engine's recorder runs in a mode that sums over ranks.
func recordsDistribution(args []string) bool {
	mode, _ := engine.FlagValue(args, "--expert-distribution-recorder-mode")
	_, metrics := engine.FlagValue(args, "--enable-expert-distribution-metrics")
	return mode == "stat" || metrics
}
