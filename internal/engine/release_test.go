// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
)

func TestParseRelease(t *testing.T) {
	for text, want := range map[string]string{
		"0.5.17": "0.5.17", "v0.22.0": "0.22.0", "v0.5.12-cu130-amd64": "0.5.12", "0.5.12.post1": "0.5.12", "v0.25.1rc1": "0.25.1", "0.32.0+cpu": "0.32.0",
		"1.3.0rc1": "1.3.0", "0.26.1.dev12+g1234": "0.26.1",
		"": "", "latest": "", "v1": "", "1.2": "", "0.5.": "", "0.5.17x": "", "99999.0.0": "", "0.0.0": "", "nightly-0.5.17": "", "0.5.17\n": "",
	} {
		if got := engine.ParseRelease(text); got.String() != want || got.Known() != (want != "") {
			t.Errorf("%q is parsed as %q, want %q", text, got, want)
		}
	}
	older, newer := engine.ParseRelease("0.5.9"), engine.ParseRelease("0.5.12")
	var unknown engine.Release
	if !older.Before(newer) || newer.Before(older) || unknown.Before(newer) || unknown.AtLeast(newer) || !newer.AtLeast(newer) || newer.AtLeast(engine.ParseRelease("1.0.0")) {
		t.Error("releases are not ordered by number, or an unknown release is ordered")
	}
}

// TestImageRelease checks that releases are read only from the tags of stock images and their mirrors.
func TestImageRelease(t *testing.T) {
	for _, test := range []struct{ engine, image, want string }{
		{"SGLang", "lmsysorg/sglang:v0.5.12", "0.5.12"},
		{"SGLang", "mirror.example:5000/lmsysorg/sglang:v0.5.17-cu130", "0.5.17"},
		{"SGLang", "lmsysorg/sglang:v0.5.12@sha256:" + strings.Repeat("0", 64), "0.5.12"},
		{"SGLang", "lmsysorg/sglang@sha256:" + strings.Repeat("0", 64), ""},
		{"SGLang", "lmsysorg/sglang:latest", ""},
		{"SGLang", "lmsysorg/sglang", ""},
		{"SGLang", "team/my-sglang:0.1.0", ""},
		{"SGLang", "sglang.example:5000/engine:0.1.0", ""},
		{"SGLang", "vllm/vllm-openai:v0.22.0", ""},
		{"VLLM", "vllm/vllm-openai:v0.22.0", "0.22.0"},
		{"VLLMAscend", "quay.io/ascend/vllm-ascend:v0.23.0-openeuler", "0.23.0"},
		{"TensorRTLLM", "nvcr.io/nvidia/tensorrt-llm/release:1.2.0", "1.2.0"},
		{"TensorRTLLM", "team/release:1.2.0", ""},
		{"VLLM", "", ""},
	} {
		adapter, err := registry.For(test.engine)
		if err != nil {
			t.Fatal(err)
		}
		if got := adapter.ImageRelease(test.image).String(); got != test.want {
			t.Errorf("%s, %s: %q, want %q", test.engine, test.image, got, test.want)
		}
	}
}

func TestReadRelease(t *testing.T) {
	for answer, want := range map[string]string{
		`{"version":"0.32.0"}`: "0.32.0", `{"version":"0.5.17","dp_size":2,"internal_states":[{}]}`: "0.5.17",
		`{}`: "", `[]`: "", `{"version":17}`: "", `not found`: "", ``: "",
	} {
		if got := engine.ReadRelease([]byte(answer)).String(); got != want {
			t.Errorf("%s is parsed as %q, want %q", answer, got, want)
		}
	}
}

// TestFailuresAtStartup checks which configurations fail at startup, or return wrong routed experts, in which release. The
// releases are the vLLM wheels with checked sources.
func TestFailuresAtStartup(t *testing.T) {
	const lmcache, nixl, multi = `--kv-transfer-config {"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}`, `--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}`,
		`--kv-transfer-config {"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":[{"kv_connector":"OffloadingConnector"},{"kv_connector":"MooncakeConnector"}]}}`
	for name, test := range map[string]struct {
		engine, release, args, env string
		unasked                    bool
		microBatches               int32
		nodes                      int32
		refused, warned            string // part of the message
	}{
		"VLLM 0.22.0, plain":               {engine: "VLLM", release: "0.22.0"},
		"VLLM 0.17.0":                      {engine: "VLLM", release: "0.17.0", refused: "spec.engine.image: VLLM 0.17.0 is invalid with spec.profiling.dataset and spec.routing.samplePercent: returning routed experts needs 0.22.0 or newer"},
		"VLLM 0.17.0, unasked":             {engine: "VLLM", release: "0.17.0", unasked: true},
		"VLLM, unknown":                    {engine: "VLLM"},
		"VLLM 0.22.0, LMCache":             {engine: "VLLM", release: "0.22.0", args: lmcache, refused: "the KV connector LMCacheConnectorV1 is invalid with --enable-return-routed-experts"},
		"VLLM 0.30.0, LMCache":             {engine: "VLLM", release: "0.30.0", args: lmcache, refused: "before vLLM 0.31.0: the engine exits at startup. Use a newer image, remove it, or set spec.routing.samplePercent to 0"},
		"VLLM 0.31.0, LMCache":             {engine: "VLLM", release: "0.31.0", args: lmcache},
		"VLLM, unknown, LMCache":           {engine: "VLLM", args: lmcache, warned: "the KV connector LMCacheConnectorV1 is invalid"},
		"VLLM 0.22.0, LMCache, unasked":    {engine: "VLLM", release: "0.22.0", args: lmcache, unasked: true},
		"VLLM 0.32.0, NIXL":                {engine: "VLLM", release: "0.32.0", args: nixl, refused: "the KV connector NixlConnector is invalid"},
		"VLLM, unknown, NIXL":              {engine: "VLLM", args: nixl, refused: "the KV connector NixlConnector is invalid"},
		"VLLM 0.32.0, member":              {engine: "VLLM", release: "0.32.0", args: "--kv-transfer-config.kv_connector NixlConnector", refused: "NixlConnector"},
		"VLLM 0.32.0, several":             {engine: "VLLM", release: "0.32.0", args: multi, refused: "the KV connector MooncakeConnector is invalid"},
		"VLLM 0.22.0, no connector":        {engine: "VLLM", release: "0.22.0", args: "--kv-transfer-config {}"},
		"VLLM 0.22.0, no object":           {engine: "VLLM", release: "0.22.0", args: "--kv-transfer-config $(KV)", refused: "a KV connector is invalid"},
		"VLLM 0.22.0, offloading":          {engine: "VLLM", release: "0.22.0", args: "--kv-offloading-size 64", refused: "--kv-offloading-size is invalid with --enable-return-routed-experts"},
		"VLLM 0.22.0, offloading nothing":  {engine: "VLLM", release: "0.22.0", args: "--kv-offloading-size 0"},
		"VLLM 0.32.0, offloading":          {engine: "VLLM", release: "0.32.0", args: "--kv-offloading-size 64"},
		"VLLM 0.22.0, context parallel":    {engine: "VLLM", release: "0.22.0", args: "-dcp 2", refused: "--decode-context-parallel-size 2 is invalid"},
		"VLLM 0.22.0, one":                 {engine: "VLLM", release: "0.22.0", args: "--prefill-context-parallel-size 1"},
		"VLLM 0.32.0, no prefix caching":   {engine: "VLLM", release: "0.32.0", args: "--no-enable-prefix-caching", refused: "--no-enable-prefix-caching is invalid"},
		"VLLM 0.33.0, no prefix caching":   {engine: "VLLM", release: "0.33.0", args: "--disable-prefix-caching", refused: "--disable-prefix-caching is invalid"},
		"VLLM 0.30.0, no prefix caching":   {engine: "VLLM", release: "0.30.0", args: "--no-enable-prefix-caching"},
		"VLLM 0.32.0, adaptive":            {engine: "VLLM", release: "0.32.0", args: `--speculative-config {"enable_adaptive_verification":true}`, refused: "enable_adaptive_verification"},
		"VLLM 0.32.0, adaptive, short":     {engine: "VLLM", release: "0.32.0", args: `-sc {"enable_adaptive_verification":true}`, refused: "enable_adaptive_verification"},
		"VLLM 0.32.0, speculative":         {engine: "VLLM", release: "0.32.0", args: `--speculative-config {"method":"mtp"}`},
		"VLLM 0.32.0, micro-batches":       {engine: "VLLM", release: "0.32.0", microBatches: 2, refused: "spec.engine.overlap.microBatches is invalid with --enable-return-routed-experts: vLLM 0.31.0"},
		"VLLM 0.32.0, micro-batches, V2":   {engine: "VLLM", release: "0.32.0", microBatches: 2, env: "VLLM_USE_V2_MODEL_RUNNER"},
		"VLLM 0.32.0, V1":                  {engine: "VLLM", release: "0.32.0", env: "VLLM_USE_V2_MODEL_RUNNER=0", refused: `spec.engine.env: VLLM_USE_V2_MODEL_RUNNER "0" is invalid with --enable-return-routed-experts`},
		"VLLM 0.32.0, V1, then V2":         {engine: "VLLM", release: "0.32.0", env: "VLLM_USE_V2_MODEL_RUNNER=0 VLLM_USE_V2_MODEL_RUNNER=1"},
		"VLLM 0.32.0, V1, unasked":         {engine: "VLLM", release: "0.32.0", env: "VLLM_USE_V2_MODEL_RUNNER=0", unasked: true},
		"VLLM 0.30.0, V1":                  {engine: "VLLM", release: "0.30.0", env: "VLLM_USE_V2_MODEL_RUNNER=0"},
		"VLLM 0.22.0, micro-batches":       {engine: "VLLM", release: "0.22.0", microBatches: 2},
		"VLLM 0.10.0, four pods":           {engine: "VLLM", release: "0.10.0", unasked: true, nodes: 4, refused: "spec.engine.image: VLLM 0.10.0 is invalid with spec.parallelism.podsPerReplica above 1"},
		"VLLM 0.22.0, four pods":           {engine: "VLLM", release: "0.22.0", nodes: 4},
		"VLLMAscend 0.18.0":                {engine: "VLLMAscend", release: "0.18.0", refused: "0.22.0 or newer"},
		"SGLang 0.5.11":                    {engine: "SGLang", release: "0.5.11", refused: "spec.engine.image: SGLang 0.5.11 is invalid"},
		"SGLang 0.5.11, unasked":           {engine: "SGLang", release: "0.5.11", unasked: true},
		"SGLang 0.5.12":                    {engine: "SGLang", release: "0.5.12"},
		"SGLang 9.9.9, newer than checked": {engine: "SGLang", release: "9.9.9"},
		"TensorRTLLM 1.2.0":                {engine: "TensorRTLLM", release: "1.2.0", unasked: true, refused: "spec.engine.image: TensorRTLLM 1.2.0 is invalid with spec.model.name: --served_model_name needs 1.3.0 or newer"},
		"TensorRTLLM 1.3.0":                {engine: "TensorRTLLM", release: "1.3.0", unasked: true},
	} {
		adapter, err := registry.For(test.engine)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(releaseName(test.engine, engine.ParseRelease(test.release), name), func(t *testing.T) {
			verdict := adapter.StartupSupport(engine.Situation{
				Release: engine.ParseRelease(test.release), UserArgs: strings.Fields(test.args), UserEnv: strings.Fields(test.env),
				Launch: engine.Launch{Ranks: 8, AttentionDP: true, RoutedExperts: !test.unasked, Nodes: test.nodes, Overlap: semmoev1.OverlapSpec{MicroBatches: test.microBatches}},
			})
			for _, check := range []struct {
				what     string
				want     string
				findings []engine.Finding
			}{{"refusal", test.refused, verdict.Refusals}, {"warning", test.warned, verdict.Warnings}} {
				if check.want == "" && len(check.findings) > 0 || check.want != "" && (len(check.findings) != 1 || !strings.Contains(check.findings[0].Message, check.want)) {
					t.Errorf("%s %+v, want %q", check.what, check.findings, check.want)
				}
			}
		})
	}
}
