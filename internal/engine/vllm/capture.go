// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/engine"
)

// The releases in which the checked behaviour changed.
var (
	// oldest is the oldest checked release. It infers ranks from --nnodes and --node-rank.
	oldest = engine.Release{Minor: 11, Patch: 2}
	// returnsExperts is the first release that returns routed experts as base64 of a .npy file in each choice
	// (vllm-project/vllm#38939).
	returnsExperts = engine.Release{Minor: 22}
	// v2Capture is the first release that captures routed experts only in the V2 model runner, where most KV connectors
	// are allowed.
	v2Capture = engine.Release{Minor: 31}
	newest    = engine.Release{Minor: 33}
)

// transferConnectors lists the connectors between prefill and decode. No release returns routed experts with them.
var transferConnectors = []string{"MoRIIOConnector", "MooncakeConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"}

// AdviceCapture is the advice when an engine cannot return routed experts.
const AdviceCapture = "set spec.routing.samplePercent to 0 and give spec.profiling.profileRef instead of dataset"

// checkStart refuses configurations with which vLLM, asked to return routed experts, fails at startup or returns wrong
// ones (vllm/config/vllm.py).
func checkStart(s engine.Situation, verdict *engine.Support) {
	if s.Launch.Nodes > 1 {
		verdict.NeedsRelease(s, "VLLM", "spec.parallelism.podsPerReplica above 1", oldest, "inferring ranks from --nnodes and --node-rank", "set podsPerReplica to 1")
	}
	if !s.Launch.RoutedExperts {
		return
	}
	verdict.NeedsRelease(s, "VLLM", "spec.profiling.dataset and spec.routing.samplePercent", returnsExperts, "returning routed experts", AdviceCapture)
	checkConnectors(s, verdict)
	refuse := func(given, why string) {
		verdict.Refuse(engine.ReasonCapture, "spec.engine.args: %s is invalid with --enable-return-routed-experts, which spec.profiling.dataset and spec.routing.samplePercent need: %s. Remove it, or %s", given, why, AdviceCapture)
	}
	for _, names := range [][]string{{"--decode-context-parallel-size", "-dcp"}, {"--prefill-context-parallel-size", "-pcp"}} {
		if value, given := engine.FlagValue(s.UserArgs, names...); given && value != "1" {
			refuse(names[0]+" "+value, "vLLM does not return routed experts with context parallelism")
		}
	}
	if !s.Release.AtLeast(v2Capture) {
		return
	}
	for _, name := range []string{"--no-enable-prefix-caching", "--disable-prefix-caching"} {
		if _, given := engine.FlagValue(s.UserArgs, name); !given {
			continue
		}
		refuse(name, "vLLM "+v2Capture.String()+" and newer return routed experts only with prefix caching")
	}
	if adaptive, _ := engine.FlagMembers(s.UserArgs, speculative...)["enable_adaptive_verification"].(bool); adaptive {
		refuse("enable_adaptive_verification in --speculative-config", "vLLM does not return routed experts with it")
	}
	if runner, known := s.Value(RunnerVariable); known && runner != "1" {
		verdict.Refuse(engine.ReasonCapture, "spec.engine.env: %s %q is invalid with --enable-return-routed-experts, which spec.profiling.dataset and spec.routing.samplePercent need: vLLM %s and newer return routed experts only with the V2 model runner. Set it to 1, remove it, or %s",
			RunnerVariable, runner, v2Capture, AdviceCapture)
	}
	if s.Launch.Overlap.MicroBatches > 0 && !s.Sets(RunnerVariable) {
		verdict.Refuse(engine.ReasonCapture, "%s.microBatches is invalid with --enable-return-routed-experts: vLLM %s and newer return routed experts only with the V2 model runner, which overlaps exchange and computation only where %s is 1. "+
			"Set it in spec.engine.env, remove the field, or %s", engine.OverlapField, v2Capture, RunnerVariable, AdviceCapture)
	}
}

// speculative lists the spellings of the flag for speculative decoding.
var speculative = []string{"--speculative-config", "-sc"}

// DraftFlag returns the flag that enables speculative decoding with a draft model, or an empty string if there is none.
// The other methods draft from text.
func DraftFlag(args []string) string {
	method, given := engine.FlagMembers(args, speculative...)["method"].(string)
	if !given {
		method, _ = engine.FlagValue(args, "--spec-method")
	}
	if strings.HasPrefix(method, "ngram") || method == "suffix" {
		return ""
	}
	for _, names := range [][]string{speculative, {"--spec-method"}, {"--spec-model"}, {"--spec-tokens"}} {
		if _, given := engine.FlagValue(args, names...); given {
			return names[0]
		}
	}
	return ""
}

// RunnerVariable is the environment variable that selects the model runner.
const RunnerVariable = "VLLM_USE_V2_MODEL_RUNNER"

// checkConnectors refuses KV connectors with which a release does not return routed experts, or returns those of other
// requests. For an unknown release, it adds a warning.
func checkConnectors(s engine.Situation, verdict *engine.Support) {
	const field = "spec.engine.args: "
	config, given := engine.FlagValue(s.UserArgs, "--kv-transfer-config")
	size, offloads := engine.FlagValue(s.UserArgs, "--kv-offloading-size")
	offloaded, err := strconv.ParseFloat(size, 64)
	offloads = offloads && (err != nil || offloaded != 0)
	members := engine.FlagMembers(s.UserArgs, "--kv-transfer-config")
	names := connectors(members)
	switch at := slices.IndexFunc(names, func(name string) bool { return slices.Contains(transferConnectors, name) }); {
	case at >= 0:
		verdict.Refuse(engine.ReasonCapture, field+"the KV connector %s is invalid with --enable-return-routed-experts, which spec.profiling.dataset and spec.routing.samplePercent need: the engine exits at startup. Remove it, or %s", names[at], AdviceCapture)
		return
	case !given && !offloads, given && !offloads && members != nil && len(names) == 0, s.Release.AtLeast(v2Capture):
		return // no connector, or an allowed one
	}
	what, why := "--kv-offloading-size", "the engine starts, and returns routed experts of other requests"
	if !offloads {
		what, why = "a KV connector", "the engine exits at startup"
		if len(names) > 0 {
			what = "the KV connector " + names[0]
		} else if config != "" && !json.Valid([]byte(config)) {
			why = "its value cannot be parsed, and with most connectors the engine exits at startup"
		}
	}
	message := "%s is invalid with --enable-return-routed-experts, which spec.profiling.dataset and spec.routing.samplePercent need, before vLLM %s: %s. Use a newer image, remove it, or %s"
	if s.Release.Known() {
		verdict.Refuse(engine.ReasonCapture, field+message, what, v2Capture, why, AdviceCapture)
	} else {
		verdict.Warn(engine.ReasonCapture, field+message, what, v2Capture, why, AdviceCapture)
	}
}

// connectors returns the names of the KV connectors in a configuration, including those inside a MultiConnector.
func connectors(config map[string]any) []string {
	var names []string
	if name, ok := config["kv_connector"].(string); ok {
		names = append(names, name)
	}
	extra, _ := config["kv_connector_extra_config"].(map[string]any)
	children, _ := extra["connectors"].([]any)
	for _, child := range children {
		if child, ok := child.(map[string]any); ok && len(names) < 64 {
			names = append(names, connectors(child)...)
		}
	}
	return slices.DeleteFunc(names, func(name string) bool { return strings.TrimSpace(name) == "" })
}
