// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"strings"
	"testing"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
)

// TestOverlap checks the flags of each engine, the refusals of engines without a flag, and that users cannot set the
// same flags.
func TestOverlap(t *testing.T) {
	type spec = semmoev1.OverlapSpec
	const deepep, lowLatency = "--moe-a2a-backend deepep", "--all2all-backend deepep_low_latency"
	for name, test := range map[string]struct {
		engine  string
		overlap spec
		user    string
		env     string
		family  string
		release string
		tensor  bool   // attention TensorParallel
		ranks   int32  // 0: 8
		want    string // part of the command line
		wantErr string
	}{
		"nothing is set":                              {engine: "SGLang", user: "--enable-two-batch-overlap", want: "--enable-two-batch-overlap"},
		"nothing is requested":                        {engine: "TensorRTLLM"},
		"SGLang":                                      {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, want: "--enable-two-batch-overlap --moe-a2a-backend deepep"},
		"SGLang, attention TP":                        {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, tensor: true, want: "--enable-two-batch-overlap"},
		"SGLang, share":                               {engine: "SGLang", overlap: spec{MicroBatches: 2, DistributionThresholdPercent: ptr.To[int32](35)}, user: deepep, want: "--enable-two-batch-overlap --tbo-token-distribution-threshold 0.35"},
		"SGLang, no share":                            {engine: "SGLang", overlap: spec{MicroBatches: 2, DistributionThresholdPercent: ptr.To[int32](0)}, user: deepep, want: "--tbo-token-distribution-threshold 0.00"},
		"SGLang, multiprocessors":                     {engine: "SGLang", overlap: spec{CommunicationSMs: 24}, user: deepep, want: `--deepep-config {"normal_dispatch":{"num_sms":24},"normal_combine":{"num_sms":24}} --moe-a2a-backend`},
		"SGLang, supported model":                     {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, family: "qwen3_moe", want: "--enable-two-batch-overlap"},
		"SGLang, GLM-4":                               {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, family: "glm4_moe", wantErr: `SGLang does not support micro-batches for models of type "glm4_moe"`},
		"SGLang, Qwen2":                               {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, family: "qwen2_moe", wantErr: `SGLang does not support micro-batches for models of type "qwen2_moe"`},
		"SGLang, MiMo-V2":                             {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, family: "mimo_v2_flash", release: "0.5.12", want: "--enable-two-batch-overlap"},
		"SGLang, DeepSeek-V4":                         {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, family: "deepseek_v4", want: "--enable-two-batch-overlap"},
		"SGLang, DeepSeek-V4, older":                  {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, family: "deepseek_v4", release: "0.5.14", wantErr: `SGLang 0.5.14 does not support micro-batches for models of type "deepseek_v4": use 0.5.15 or newer`},
		"SGLang, unsupported model":                   {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep, family: "mixtral", wantErr: `spec.engine.overlap.microBatches: SGLang does not support micro-batches for models of type "mixtral"`},
		"SGLang, unsupported model, no backend":       {engine: "SGLang", overlap: spec{MicroBatches: 2}, family: "gpt_oss", wantErr: `spec.engine.overlap.microBatches: SGLang does not support micro-batches for models of type "gpt_oss"`},
		"SGLang, multiprocessors, any model":          {engine: "SGLang", overlap: spec{CommunicationSMs: 24}, user: deepep, family: "mixtral", want: "--deepep-config"},
		"SGLang, three":                               {engine: "SGLang", overlap: spec{MicroBatches: 3}, user: deepep, wantErr: "spec.engine.overlap.microBatches: 3: SGLang supports exactly 2 micro-batches"},
		"SGLang, threshold of decoding":               {engine: "SGLang", overlap: spec{MicroBatches: 2, DecodeThresholdTokens: 8}, user: deepep, wantErr: "spec.engine.overlap.decodeThresholdTokens: SGLang has no flag for it"},
		"SGLang, threshold of prompts":                {engine: "SGLang", overlap: spec{MicroBatches: 2, PrefillThresholdTokens: 8}, user: deepep, wantErr: "spec.engine.overlap.prefillThresholdTokens: SGLang has no flag for it"},
		"SGLang, no backend":                          {engine: "SGLang", overlap: spec{MicroBatches: 2}, wantErr: "spec.engine.overlap: without an all-to-all backend"},
		"SGLang, backend none":                        {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: "--moe-a2a-backend=none", wantErr: "set --moe-a2a-backend in spec.engine.args"},
		"SGLang, another backend":                     {engine: "SGLang", overlap: spec{CommunicationSMs: 24}, user: "--moe-a2a-backend mooncake", wantErr: "spec.engine.overlap.communicationSMs: it configures DeepEP, and --moe-a2a-backend in spec.engine.args is mooncake"},
		"SGLang, model without DeepEP":                {engine: "SGLang", overlap: spec{CommunicationSMs: 24}, family: "gpt_oss", wantErr: "cannot run gpt_oss models with deepep: remove the field"},
		"SGLang, model without DeepEP, other backend": {engine: "SGLang", overlap: spec{CommunicationSMs: 24}, user: "--moe-a2a-backend mooncake", family: "gpt_oss", wantErr: "spec.engine.overlap.communicationSMs: it configures DeepEP, and the checked releases"},
		"SGLang, low latency":                         {engine: "SGLang", overlap: spec{CommunicationSMs: 24}, user: deepep + " --deepep-mode low_latency", wantErr: "spec.engine.overlap.communicationSMs: DeepEP does not accept a number"},
		"SGLang, both":                                {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep + " --enable-two-batch-overlap", wantErr: `"--enable-two-batch-overlap" contradicts spec.engine.overlap.microBatches`},
		"SGLang, fused experts":                       {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep + " --enforce-shared-experts-fusion", wantErr: `"--enforce-shared-experts-fusion" contradicts spec.engine.overlap.microBatches`},
		"SGLang, user DeepEP config":                  {engine: "SGLang", overlap: spec{CommunicationSMs: 24}, user: deepep + " --deepep-config x.json", wantErr: `"--deepep-config" contradicts spec.engine.overlap.communicationSMs`},
		"SGLang, micro-batches and DeepEP config":     {engine: "SGLang", overlap: spec{MicroBatches: 2}, user: deepep + " --deepep-config x.json", want: "--deepep-config x.json"},

		"vLLM":                              {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: lowLatency, want: "--enable-dbo --all2all-backend"},
		"vLLM, four":                        {engine: "VLLM", overlap: spec{MicroBatches: 4}, user: "--all2all-backend=deepep_high_throughput", want: "--ubatch-size 4 --all2all-backend"},
		"vLLM, thresholds":                  {engine: "VLLM", overlap: spec{MicroBatches: 2, DecodeThresholdTokens: 16, PrefillThresholdTokens: 1024}, user: lowLatency, want: "--enable-dbo --dbo-decode-token-threshold 16 --dbo-prefill-token-threshold 1024 --all2all-backend"},
		"vLLM, removed variable":            {engine: "VLLM", overlap: spec{MicroBatches: 2}, env: "VLLM_ALL2ALL_BACKEND", wantErr: "set --all2all-backend in spec.engine.args"},
		"vLLM, no backend":                  {engine: "VLLM", overlap: spec{MicroBatches: 2}, wantErr: "to deepep_high_throughput, deepep_low_latency, nixl_ep, or remove the field"},
		"vLLM, NIXL":                        {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: "--all2all-backend nixl_ep", release: "0.24.0", want: "--enable-dbo"},
		"vLLM, NIXL, any release":           {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: "--all2all-backend nixl_ep", want: "--enable-dbo"},
		"vLLM, NIXL, older":                 {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: "--all2all-backend nixl_ep", release: "0.23.0", wantErr: "VLLM 0.23.0 does not overlap exchange and computation with --all2all-backend nixl_ep: use 0.24.0 or newer"},
		"vLLM, DeepEP, older":               {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: lowLatency, release: "0.22.0", want: "--enable-dbo"},
		"vLLM, a collective":                {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: "--all2all-backend naive", env: "VLLM_ALL2ALL_BACKEND", wantErr: "set --all2all-backend"},
		"vLLM, attention TP":                {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: lowLatency, tensor: true, wantErr: "spec.engine.overlap: VLLM overlaps only with data-parallel attention"},
		"vLLM, one rank":                    {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: lowLatency, ranks: 1, wantErr: "spec.parallelism.expertParallelSize is 1"},
		"vLLM, share":                       {engine: "VLLM", overlap: spec{MicroBatches: 2, DistributionThresholdPercent: ptr.To[int32](0)}, user: lowLatency, wantErr: "spec.engine.overlap.distributionThresholdPercent: VLLM has no flag for it"},
		"vLLM, multiprocessors":             {engine: "VLLM", overlap: spec{CommunicationSMs: 24}, user: lowLatency, wantErr: "VLLM_DBO_COMM_SMS"},
		"vLLM, both":                        {engine: "VLLM", overlap: spec{MicroBatches: 2}, user: lowLatency + " --ubatch_size=4", wantErr: `"--ubatch_size=4" contradicts spec.engine.overlap.microBatches`},
		"vLLM, four and two":                {engine: "VLLM", overlap: spec{MicroBatches: 4}, user: lowLatency + " --enable-dbo", wantErr: `"--enable-dbo" contradicts spec.engine.overlap.microBatches`},
		"vLLM, threshold set twice":         {engine: "VLLM", overlap: spec{MicroBatches: 2, DecodeThresholdTokens: 16}, user: lowLatency + " --dbo-decode-token-threshold 8", wantErr: "contradicts spec.engine.overlap.decodeThresholdTokens"},
		"vLLM, other threshold set by user": {engine: "VLLM", overlap: spec{MicroBatches: 2, DecodeThresholdTokens: 16}, user: lowLatency + " --dbo-prefill-token-threshold 8", want: "--dbo-prefill-token-threshold 8"},
		"Ascend":                            {engine: "VLLMAscend", overlap: spec{MicroBatches: 2}, user: lowLatency, wantErr: "spec.engine.overlap: VLLMAscend has no flag for it"},
		"TensorRT-LLM":                      {engine: "TensorRTLLM", overlap: spec{CommunicationSMs: 2}, wantErr: "spec.engine.overlap: TensorRTLLM has no flag for it"},
	} {
		adapter, err := registry.For(test.engine)
		if err != nil {
			t.Fatal(err)
		}
		s := engine.Situation{
			Launch:   engine.Launch{ModelPath: "/models/m", Ranks: 8, AttentionDP: !test.tensor, Overlap: test.overlap},
			UserArgs: strings.Fields(test.user), UserEnv: strings.Fields(test.env), Family: test.family,
			Release: engine.ParseRelease(test.release),
		}
		if test.ranks > 0 {
			s.Launch.Ranks = test.ranks
		}
		t.Run(releaseName(test.engine, s.Release, name), func(t *testing.T) {
			err := adapter.ValidateOverlap(s)
			var args []string
			if err == nil {
				args, err = adapter.Args(s.Launch, s.UserArgs)
			}
			switch got := strings.Join(args, " "); {
			case test.wantErr != "":
				if err == nil || !strings.Contains(err.Error(), test.wantErr) {
					t.Errorf("error %v, want %q", err, test.wantErr)
				}
			case err != nil || !strings.Contains(got, test.want):
				t.Errorf("%v: %s\nwant %s", err, got, test.want)
			}
		})
	}
}
