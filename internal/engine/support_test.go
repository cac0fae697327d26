// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"cmp"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/family"
)

func support(t *testing.T, engineType string, s engine.Situation) engine.Support {
	t.Helper()
	adapter, err := registry.For(engineType)
	if err != nil {
		t.Fatal(err)
	}
	return adapter.Support(s)
}

func reasons(findings []engine.Finding) string {
	var list []string
	for _, finding := range findings {
		list = append(list, finding.Reason)
	}
	return strings.Join(list, " ")
}

func TestSupport(t *testing.T) {
	guide := readGuide(t, "engine-plans.md")
	const byMap, byWeights = engine.EngineMap, engine.ReshuffledWeights
	for name, test := range map[string]struct {
		engine             string
		realization        engine.Realization
		change             func(s *engine.Situation)
		refusals, warnings string
	}{
		"SGLang, map":                      {engine: "SGLang", realization: byMap},
		"SGLang, weights":                  {engine: "SGLang", realization: byWeights},
		"SGLang, adapters, map":            {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --enable-lora")},
		"SGLang, adapters, weights":        {engine: "SGLang", realization: byWeights, change: args("--moe-a2a-backend deepep --lora-paths a=/a"), refusals: "ExternalExperts"},
		"VLLM, adapters, weights":          {engine: "VLLM", realization: byWeights, change: args("--all2all-backend deepep_low_latency --enable-lora"), refusals: "ExternalExperts"},
		"VLLMAscend, adapters, weights":    {engine: "VLLMAscend", realization: byWeights, change: args("--enable-lora --lora-modules a=/a"), refusals: "ExternalExperts"},
		"SGLang, no backend, map":          {engine: "SGLang", realization: byMap, change: args(""), warnings: "NoAllToAll UnprovenMap"},
		"SGLang, no backend, weights":      {engine: "SGLang", realization: byWeights, change: args("--moe-a2a-backend none"), warnings: "NoAllToAll"},
		"SGLang, no backend, other family": {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) { s.UserArgs, s.Family = nil, "deepseek_v3" }, warnings: "NoAllToAll UnprovenMap"},
		"SGLang, no backend, Qwen2":        {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) { s.UserArgs, s.Family = nil, "qwen2_moe" }, warnings: "NoAllToAll UnprovenMap"},
		"SGLang, no backend, Qwen3-Next":   {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) { s.UserArgs, s.Family = nil, "qwen3_next" }, warnings: "NoAllToAll UnprovenMap"},
		"SGLang, no backend, Qwen3-VL": {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) {
			s.UserArgs, s.Family, s.Wrapper = nil, "qwen3_vl_moe_text", "qwen3_vl_moe"
		}, warnings: "NoAllToAll UnprovenMap"},
		"SGLang, unknown family, map":                 {engine: "SGLang", realization: byMap, change: ofFamily("")},
		"SGLang, unknown family, weights":             {engine: "SGLang", realization: byWeights, change: ofFamily("")},
		"SGLang, unknown family, no backend, map":     {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) { s.UserArgs, s.Family = nil, "" }, warnings: "NoAllToAll UnprovenMap"},
		"SGLang, unknown family, no backend, weights": {engine: "SGLang", realization: byWeights, change: func(s *engine.Situation) { s.UserArgs, s.Family = nil, "" }, warnings: "NoAllToAll"},
		"SGLang, Qwen2, map":                          {engine: "SGLang", realization: byMap, change: ofFamily("qwen2_moe")},
		"SGLang, gpt-oss, map":                        {engine: "SGLang", realization: byMap, change: ofFamily("gpt_oss"), warnings: "ExpertMapWithoutEffect"},
		"SGLang, gpt-oss, weights":                    {engine: "SGLang", realization: byWeights, change: ofFamily("gpt_oss")},
		"SGLang, Mixtral, map":                        {engine: "SGLang", realization: byMap, change: ofFamily("mixtral"), refusals: "ExpertMapIgnored"},
		"SGLang, OLMoE, map":                          {engine: "SGLang", realization: byMap, change: ofFamily("olmoe"), refusals: "ExpertMapIgnored"},
		"SGLang, wrapper, map":                        {engine: "SGLang", realization: byMap, change: wrapper("qwen3_vl_moe")},
		"SGLang, other wrapper, map":                  {engine: "SGLang", realization: byMap, change: wrapper("internvl_chat"), refusals: "ExpertMapIgnored"},
		"SGLang, other wrapper, weights":              {engine: "SGLang", realization: byWeights, change: wrapper("internvl_chat")},
		"SGLang, Mixtral, weights":                    {engine: "SGLang", realization: byWeights, change: ofFamily("mixtral")},
		"SGLang, NVFP4, map":                          {engine: "SGLang", realization: byMap, change: quantization("modelopt/NVFP4"), refusals: "QuantizedScales"},
		"SGLang, packed NVFP4, map":                   {engine: "SGLang", realization: byMap, change: quantization("compressed-tensors/nvfp4-pack-quantized"), refusals: "QuantizedScales"},
		"SGLang, NVFP4, weights":                      {engine: "SGLang", realization: byWeights, change: quantization("modelopt/NVFP4")},
		"SGLang, FP8, map":                            {engine: "SGLang", realization: byMap, change: quantization("fp8")},
		"SGLang, Gemma, capture":                      {engine: "SGLang", realization: byWeights, change: of(ofFamily("gemma4_text"), observed), warnings: "CaptureUnsupported"},
		"SGLang, Gemma":                               {engine: "SGLang", realization: byWeights, change: ofFamily("gemma4_text")},
		"SGLang, Step, capture":                       {engine: "SGLang", realization: byWeights, change: of(ofFamily("step3p5"), observed), warnings: "CaptureUnsupported"},
		"SGLang, EPLB":                                {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --enable-eplb"), refusals: "ContradictingFlags"},
		"SGLang, EPLB, weights":                       {engine: "SGLang", realization: byWeights, change: args("--moe-a2a-backend deepep --enable-eplb"), refusals: "ContradictingFlags"},
		"SGLang, recorder":                            {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --enable-expert-distribution-metrics"), warnings: "RecorderNeedsDeepEPMode"},
		"SGLang, recorder, auto":                      {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend=deepep --deepep-mode auto --expert-distribution-recorder-mode stat"), warnings: "RecorderNeedsDeepEPMode"},
		"SGLang, recorder, normal":                    {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --deepep-mode normal --expert-distribution-recorder-mode stat")},
		"SGLang, attention TP":                        {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) { s.Launch.AttentionDP = false }},
		"SGLang, attention TP, no backend":            {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) { args("")(s); s.Launch.AttentionDP = false }, refusals: "NoAllToAll", warnings: "UnprovenMap"},
		"SGLang, one rank":                            {engine: "SGLang", realization: byMap, change: func(s *engine.Situation) { s.Launch.Ranks = 1 }, refusals: "SingleRank"},
		"SGLang, copies, map":                         {engine: "SGLang", realization: byMap, change: copies},
		"SGLang, copies, weights":                     {engine: "SGLang", realization: byWeights, change: copies, refusals: "RedundantExpertsUnsupported"},
		"SGLang, fixed experts, map":                  {engine: "SGLang", realization: byMap, change: fixed},
		"SGLang, fixed experts, weights":              {engine: "SGLang", realization: byWeights, change: fixed, refusals: "CheckpointNotPermutable"},
		"SGLang, copies, no backend, map":             {engine: "SGLang", realization: byMap, change: of(args(""), copies), refusals: "NoAllToAll", warnings: "NoAllToAll"},
		"SGLang, copies, no backend, newest, map":     {engine: "SGLang", realization: byMap, change: of(args(""), copies, release("0.5.23")), refusals: "NoAllToAll", warnings: "NoAllToAll"},
		"SGLang 0.5.17, no backend, map":              {engine: "SGLang", realization: byMap, change: of(args(""), release("0.5.17")), refusals: "UnprovenMap", warnings: "NoAllToAll"},
		"SGLang 0.5.22, no backend, unknown, map":     {engine: "SGLang", realization: byMap, change: of(args(""), ofFamily(""), release("0.5.22")), refusals: "UnprovenMap", warnings: "NoAllToAll"},
		"SGLang 0.5.17, no backend, weights":          {engine: "SGLang", realization: byWeights, change: of(args(""), release("0.5.17")), warnings: "NoAllToAll"},
		"SGLang 0.5.17, no backend, DeepSeek, map":    {engine: "SGLang", realization: byMap, change: of(args(""), ofFamily("deepseek_v3"), release("0.5.17")), refusals: "UnprovenMap", warnings: "NoAllToAll"},
		"SGLang 0.5.17, no backend, GLM-4, map":       {engine: "SGLang", realization: byMap, change: of(args(""), ofFamily("glm4_moe"), release("0.5.17")), refusals: "UnprovenMap", warnings: "NoAllToAll"},
		"SGLang 0.5.23, no backend, map":              {engine: "SGLang", realization: byMap, change: of(args(""), release("0.5.23")), warnings: "NoAllToAll"},
		"SGLang 0.6.0, no backend, map":               {engine: "SGLang", realization: byMap, change: of(args(""), release("0.6.0")), warnings: "NoAllToAll UnknownRelease"},
		"SGLang 0.5.17, deepep, map":                  {engine: "SGLang", realization: byMap, change: release("0.5.17")},
		"SGLang 0.5.17, mooncake, Qwen3, map":         {engine: "SGLang", realization: byMap, change: of(args("--moe-a2a-backend mooncake"), release("0.5.17")), refusals: "UnprovenMap"},
		"SGLang 0.5.18, mooncake, Qwen3, map":         {engine: "SGLang", realization: byMap, change: of(args("--moe-a2a-backend mooncake"), release("0.5.18"))},
		"SGLang, mooncake, Qwen3, map":                {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend mooncake")},
		"SGLang 0.5.17, nixl, DeepSeek, map":          {engine: "SGLang", realization: byMap, change: of(args("--moe-a2a-backend=nixl"), ofFamily("deepseek_v3"), release("0.5.17"))},
		"SGLang 0.5.17, pplx, DeepSeek, map":          {engine: "SGLang", realization: byMap, change: of(args("--moe-a2a-backend=pplx"), ofFamily("deepseek_v3"), release("0.5.17")), refusals: "UnprovenMap"},
		"SGLang 0.5.17, flashinfer, Qwen2, map":       {engine: "SGLang", realization: byMap, change: of(args("--moe-a2a-backend flashinfer"), ofFamily("qwen2_moe"), release("0.5.17")), refusals: "UnprovenMap"},
		"SGLang 0.5.11, map":                          {engine: "SGLang", realization: byMap, change: release("0.5.11"), refusals: "EngineReleaseTooOld"},
		"SGLang, drafts, map":                         {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --speculative-algorithm EAGLE"), warnings: "DraftModelExperts"},
		"SGLang, drafts of texts, map":                {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --speculative-algorithm NGRAM")},
		"SGLang, no drafts, map":                      {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --speculative-algorithm NONE")},
		"SGLang, drafts, abbreviated":                 {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --speculative-algo EAGLE"), warnings: "DraftModelExperts"},
		"SGLang, drafts, weights":                     {engine: "SGLang", realization: byWeights, change: args("--moe-a2a-backend deepep --speculative-algorithm EAGLE")},
		"SGLang, recorder, newer":                     {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --expert-balancedness-report-mode prometheus"), warnings: "RecorderNeedsDeepEPMode"},
		"SGLang, recorder, newer, off":                {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --expert-balancedness-report-mode off")},
		"SGLang, operator's TLS": {engine: "SGLang", realization: byWeights, change: func(s *engine.Situation) {
			args("--moe-a2a-backend deepep --ssl-certfile=/tls/tls.crt")(s)
			s.Launch.CertFile, s.Launch.KeyFile = "/tls/tls.crt", "/tls/tls.key"
		}, refusals: "ContradictingFlags"},
		"SGLang, TLS":                   {engine: "SGLang", realization: byWeights, change: args("--moe-a2a-backend deepep --ssl-keyfile=/tls/tls.key --ssl-certfile=/tls/tls.crt"), warnings: "EngineServesTLS"},
		"SGLang, key":                   {engine: "SGLang", realization: byMap, change: args("--moe-a2a-backend deepep --api-key $(KEY)"), warnings: "EngineRequiresKey"},
		"SGLang, groups, map":           {engine: "SGLang", realization: byMap, change: groups(false)},
		"SGLang, groups, weights":       {engine: "SGLang", realization: byWeights, change: groups(false), refusals: "GroupLimitedGate"},
		"SGLang, whole groups, weights": {engine: "SGLang", realization: byWeights, change: groups(true)},
		"unknown":                       {engine: "SGLang", realization: "Magic", refusals: "UnknownRealization"},

		"vLLM, map":              {engine: "VLLM", realization: byMap, refusals: "ExpertMapUnsupported"},
		"vLLM, TLS":              {engine: "VLLM", realization: byWeights, change: args("--all2all-backend deepep_low_latency --ssl_certfile /tls/tls.crt"), warnings: "EngineServesTLS"},
		"vLLM, key":              {engine: "VLLM", realization: byWeights, change: of(args("--all2all-backend deepep_low_latency"), func(s *engine.Situation) { s.UserEnv = []string{"VLLM_API_KEY"} }), warnings: "EngineRequiresKey"},
		"vLLM, weights":          {engine: "VLLM", realization: byWeights, change: args("--all2all-backend deepep_low_latency")},
		"vLLM, no backend":       {engine: "VLLM", realization: byWeights, change: args(""), warnings: "NoAllToAll"},
		"vLLM, collective":       {engine: "VLLM", realization: byWeights, change: args("--all2all-backend=allgather_reducescatter"), warnings: "NoAllToAll"},
		"vLLM, removed variable": {engine: "VLLM", realization: byWeights, change: func(s *engine.Situation) { s.UserEnv = []string{"VLLM_ALL2ALL_BACKEND"} }, warnings: "NoAllToAll"},
		"vLLM, removed backend":  {engine: "VLLM", realization: byWeights, change: args("--all2all-backend pplx"), warnings: "NoAllToAll"},
		"vLLM, both": {engine: "VLLM", realization: byWeights, change: func(s *engine.Situation) {
			args("--all2all-backend naive")(s)
			s.UserEnv = []string{"VLLM_ALL2ALL_BACKEND"}
		}, warnings: "NoAllToAll"},
		"vLLM, EPLB": {engine: "VLLM", realization: byWeights, change: args("--all2all-backend deepep_low_latency --enable-eplb"), refusals: "ContradictingFlags"},
		"vLLM, NVFP4": {engine: "VLLM", realization: byWeights, change: func(s *engine.Situation) {
			args("--all2all-backend deepep_low_latency")(s)
			s.Quantization = "modelopt"
		}},
		"vLLM, OLMoE": {engine: "VLLM", realization: byWeights, change: func(s *engine.Situation) { args("--all2all-backend deepep_low_latency")(s); s.Family = "olmoe" }},
		"vLLM, attention TP and groups": {engine: "VLLM", realization: byWeights, change: func(s *engine.Situation) {
			args("--all2all-backend deepep_low_latency")(s)
			groups(false)(s)
			s.Launch.AttentionDP = false
		}, refusals: "GroupLimitedGate NoAllToAll"},

		"Ascend, map":              {engine: "VLLMAscend", realization: byMap},
		"Ascend, map, config":      {engine: "VLLMAscend", realization: byMap, change: args("--additional-config {}"), refusals: "ContradictingFlags"},
		"Ascend, weights, config":  {engine: "VLLMAscend", realization: byWeights, change: args(`--additional-config {"torchair_graph_config":{}}`)},
		"Ascend, weights, own map": {engine: "VLLMAscend", realization: byWeights, change: args(`--additional-config={"eplb_config":{"dynamic_eplb":true}}`), refusals: "ContradictingFlags"},
		"Ascend, variable":         {engine: "VLLMAscend", realization: byMap, change: func(s *engine.Situation) { s.UserEnv = []string{"DYNAMIC_EPLB"} }, refusals: "ContradictingFlags"},
		"Ascend, copies":           {engine: "VLLMAscend", realization: byMap, change: copies},

		"vLLM 0.17.0, observed": {engine: "VLLM", realization: byWeights, change: of(args("--all2all-backend deepep_low_latency"), observed, release("0.17.0")), refusals: "EngineReleaseTooOld"},
		"vLLM 0.17.0":           {engine: "VLLM", realization: byWeights, change: of(args("--all2all-backend deepep_low_latency"), release("0.17.0"))},
		"vLLM 0.22.0, observed": {engine: "VLLM", realization: byWeights, change: of(args("--all2all-backend deepep_low_latency"), observed, release("0.22.0"))},
		"vLLM 0.33.0":           {engine: "VLLM", realization: byWeights, change: of(args("--all2all-backend deepep_low_latency"), release("0.33.0"))},
		"vLLM 0.34.0":           {engine: "VLLM", realization: byWeights, change: of(args("--all2all-backend deepep_low_latency"), release("0.34.0")), warnings: "UnknownRelease"},
		"vLLM, drafts, weights": {engine: "VLLM", realization: byWeights, change: args(`--all2all-backend deepep_low_latency --speculative-config {"method":"mtp"}`)},

		"Ascend, drafts, map":           {engine: "VLLMAscend", realization: byMap, change: args(`--speculative-config {"method":"mtp"}`), warnings: "DraftModelExperts"},
		"Ascend, drafts, short":         {engine: "VLLMAscend", realization: byMap, change: args(`-sc {"method":"mtp"}`), warnings: "DraftModelExperts"},
		"Ascend, drafts, method":        {engine: "VLLMAscend", realization: byMap, change: args("--spec-method mtp --spec-tokens 1"), warnings: "DraftModelExperts"},
		"Ascend, drafts of texts":       {engine: "VLLMAscend", realization: byMap, change: args(`--speculative-config {"method":"ngram","num_speculative_tokens":2}`)},
		"Ascend, drafts, weights":       {engine: "VLLMAscend", realization: byWeights, change: args(`--speculative-config {"method":"mtp"}`)},
		"Ascend 0.29, capture, map":     {engine: "VLLMAscend", realization: byMap, change: of(args(""), observed, release("0.29.0"))},
		"Ascend 0.30, capture, map":     {engine: "VLLMAscend", realization: byMap, change: of(args(""), observed, release("0.30.0")), refusals: "CaptureUnsupported"},
		"Ascend 0.30, capture, weights": {engine: "VLLMAscend", realization: byWeights, change: of(args(""), observed, release("0.30.0")), refusals: "CaptureUnsupported"},
		"Ascend 0.30, capture, V2":      {engine: "VLLMAscend", realization: byWeights, change: of(args(""), observed, release("0.30.0"), func(s *engine.Situation) { s.UserEnv = []string{"VLLM_USE_V2_MODEL_RUNNER"} })},
		"Ascend 0.30, capture, V1":      {engine: "VLLMAscend", realization: byWeights, change: of(args(""), observed, release("0.30.0"), func(s *engine.Situation) { s.UserEnv = []string{"VLLM_USE_V2_MODEL_RUNNER=0"} }), refusals: "CaptureUnsupported"},
		"Ascend 0.30, map":              {engine: "VLLMAscend", realization: byMap, change: of(args(""), release("0.30.0"))},
		"Ascend, V1 runner, map":        {engine: "VLLMAscend", realization: byMap, change: func(s *engine.Situation) { s.UserEnv = []string{"VLLM_USE_V2_MODEL_RUNNER=0"} }},
		"Ascend, V2 runner, map":        {engine: "VLLMAscend", realization: byMap, change: func(s *engine.Situation) { s.UserEnv = []string{"VLLM_USE_V2_MODEL_RUNNER"} }, warnings: "MapNeedsV1Runner"},

		"TensorRT, GLM-4":                {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("glm4_moe")), refusals: "ExpertMapIgnored", warnings: "RankPinningUnsupported"},
		"TensorRT, DeepSeek-V2":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("deepseek_v2")), refusals: "ExpertMapIgnored", warnings: "RankPinningUnsupported"},
		"TensorRT, DeepSeek-V3":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("deepseek_v3")), warnings: "RankPinningUnsupported"},
		"TensorRT, unknown":              {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.2":                   {engine: "TensorRTLLM", realization: byMap, change: of(args(""), release("1.2.0")), refusals: "EngineReleaseTooOld", warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, gpt-oss":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("gpt_oss"), release("1.3.0rc1")), warnings: "ExpertMapWithoutEffect RankPinningUnsupported"},
		"TensorRT 1.3, gpt-oss, AUTO":    {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("gpt_oss"), release("1.3.0"), options("moe_config: {backend: AUTO}")), warnings: "ExpertMapWithoutEffect RankPinningUnsupported"},
		"TensorRT 1.3, gpt-oss, CUTLASS": {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("gpt_oss"), release("1.3.0"), options("moe_config: {backend: CUTLASS}")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, DeepSeek-V3.2":    {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("deepseek_v32"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, DeepSeek-V4":      {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("deepseek_v4"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, GLM-5":            {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("glm_moe_dsa"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Nemotron-H":       {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("nemotron_h"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Qwen3.5, text":    {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("qwen3_5_moe_text"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Mixtral":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("mixtral"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Qwen2":            {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("qwen2_moe"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Kimi-K2":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("kimi_k2"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.2, DeepSeek-V3.2":    {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("deepseek_v32"), release("1.2.0")), refusals: "ExpertMapIgnored EngineReleaseTooOld", warnings: "RankPinningUnsupported"},
		"TensorRT 1.2, Mixtral":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("mixtral"), release("1.2.0")), refusals: "EngineReleaseTooOld", warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Kimi-K2.5":        {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("kimi_k2"), wrapper("kimi_k25"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Qwen3-VL":         {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("qwen3_vl_moe_text"), wrapper("qwen3_vl_moe"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Qwen3.5":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("qwen3_5_moe_text"), wrapper("qwen3_5_moe"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, Llama 4":          {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("llama4_text"), wrapper("llama4"), release("1.3.0")), warnings: "RankPinningUnsupported"},
		"TensorRT, Llama 4, text":        {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("llama4_text")), refusals: "ExpertMapIgnored", warnings: "RankPinningUnsupported"},
		"TensorRT, Qwen3-VL, text":       {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("qwen3_vl_moe_text")), refusals: "ExpertMapIgnored", warnings: "RankPinningUnsupported"},
		"TensorRT, other wrapper":        {engine: "TensorRTLLM", realization: byMap, change: of(args(""), wrapper("internvl_chat")), refusals: "ExpertMapIgnored", warnings: "RankPinningUnsupported"},
		"TensorRT, Nemotron-H, wrapper":  {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("nemotron_h"), wrapper("NemotronH_Nano_VL_V2")), refusals: "ExpertMapIgnored", warnings: "RankPinningUnsupported"},
		"TensorRT, Qwen3-Next":           {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("qwen3_next")), refusals: "ExpertMapIgnored", warnings: "RankPinningUnsupported"},
		"TensorRT 1.2, Kimi-K2.5":        {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("kimi_k2"), wrapper("kimi_k25"), release("1.2.0")), refusals: "ExpertMapIgnored EngineReleaseTooOld", warnings: "RankPinningUnsupported"},
		"TensorRT, DSpark":               {engine: "TensorRTLLM", realization: byMap, change: of(args(""), ofFamily("deepseek_v4"), options("speculative_config: {decoding_type: DSpark}")), refusals: "DraftModelExperts", warnings: "RankPinningUnsupported"},
		"TensorRT, DSpark, Qwen3":        {engine: "TensorRTLLM", realization: byMap, change: of(args(""), options("speculative_config: {decoding_type: DSpark}")), warnings: "RankPinningUnsupported"},
		"TensorRT, VANILLA":              {engine: "TensorRTLLM", realization: byMap, change: of(args(""), options("moe_config: {backend: VANILLA}")), refusals: "ExpertMapWithoutEffect", warnings: "RankPinningUnsupported"},
		"TensorRT 1.3, WIDEEP":           {engine: "TensorRTLLM", realization: byMap, change: of(args(""), release("1.3.0"), options("moe_config: {backend: WIDEEP}")), refusals: "ExpertMapWithoutEffect", warnings: "RankPinningUnsupported"},
		"TensorRT, WIDEEP":               {engine: "TensorRTLLM", realization: byMap, change: of(args(""), options("moe_config: {backend: WIDEEP}")), refusals: "ExpertMapWithoutEffect", warnings: "RankPinningUnsupported"},
		"TensorRT, MTP":                  {engine: "TensorRTLLM", realization: byMap, change: of(args(""), options("speculative_config: {decoding_type: MTP}")), refusals: "DraftModelExperts", warnings: "RankPinningUnsupported"},
		"TensorRT, EAGLE":                {engine: "TensorRTLLM", realization: byMap, change: of(args(""), options("speculative_config: {decoding_type: Eagle}")), warnings: "RankPinningUnsupported"},
		"TensorRT, user map":             {engine: "TensorRTLLM", realization: byMap, change: of(args(""), options("moe_config: {load_balancer: /x}")), refusals: "ContradictingFlags", warnings: "RankPinningUnsupported"},

		"TensorRT, map":          {engine: "TensorRTLLM", realization: byMap, change: args(""), warnings: "RankPinningUnsupported"},
		"TensorRT, weights":      {engine: "TensorRTLLM", realization: byWeights, change: args(""), refusals: "RankPinningUnsupported"},
		"TensorRT, attention TP": {engine: "TensorRTLLM", realization: byMap, change: func(s *engine.Situation) { args("")(s); s.Launch.AttentionDP = false }, refusals: "NoAllToAll", warnings: "RankPinningUnsupported"},
		"TensorRT, one rank":     {engine: "TensorRTLLM", realization: byMap, change: func(s *engine.Situation) { args("")(s); s.Launch.Ranks = 1 }, refusals: "SingleRank", warnings: "RankPinningUnsupported"},
		"TensorRT, user options": {engine: "TensorRTLLM", realization: byMap, change: args("--extra_llm_api_options /x.yaml"), refusals: "ContradictingFlags", warnings: "RankPinningUnsupported"},
	} {
		s := engine.Situation{
			Realization: test.realization, Family: "qwen3_moe", Groups: 1,
			Launch: engine.Launch{ModelPath: "/models", Ranks: 8, AttentionDP: true}, UserArgs: []string{"--moe-a2a-backend", "deepep"},
		}
		if strings.HasPrefix(name, "vLLM") || strings.HasPrefix(name, "Ascend") {
			s.UserArgs = nil
		}
		if test.change != nil {
			test.change(&s)
		}
		t.Run(releaseName(test.engine, s.Release, name), func(t *testing.T) {
			got := support(t, test.engine, s)
			if reasons(got.Refusals) != test.refusals || reasons(got.Warnings) != test.warnings {
				t.Errorf("refusals %+v, warnings %+v; want %q, %q", got.Refusals, got.Warnings, test.refusals, test.warnings)
			}
			for _, finding := range slices.Concat(got.Refusals, got.Warnings) {
				if test.realization == "Magic" {
					continue // refused by API validation
				}
				if !strings.Contains(guide, "| `"+finding.Reason+"` |") {
					t.Errorf("docs/engine-plans.md does not explain %s", finding.Reason)
				}
				if len(finding.Message) < 40 || len(finding.Message) > 1024 {
					t.Errorf("%d characters: %s", len(finding.Message), finding.Message)
				}
			}
		})
	}
}

// releaseName returns the name of a subtest: the engine, its release, and the case.
func releaseName(engineType string, r engine.Release, name string) string {
	return engineType + " " + cmp.Or(r.String(), "of unknown release") + "/" + name
}

func readGuide(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestGuideListsAdapters compares the table in docs/engines.md with the adapters.
func TestGuideListsAdapters(t *testing.T) {
	guide := readGuide(t, "engines.md")
	code := func(value string) string {
		if value == "" {
			return "none"
		}
		return "`" + value + "`"
	}
	for _, a := range registry.All() {
		file := ""
		if a.ExpertMap != nil {
			file = a.ExpertMap.File
		}
		row := "| " + strings.Join([]string{
			code(a.Type), code(strings.Join(a.Command, " ")), code(a.RankHeader), code(a.RoutingKeyHeader), code(a.HealthPath), code(file),
		}, " | ") + " | "
		if !strings.Contains(guide, row) {
			t.Errorf("docs/engines.md has no row %s", row)
		}
	}
}

// TestGuideListsSupport compares the table of abilities in docs/engines.md with what the adapters accept.
func TestGuideListsSupport(t *testing.T) {
	rows := map[string][]string{}
	for line := range strings.Lines(readGuide(t, "engines.md")) {
		if cells := strings.Split(strings.TrimSpace(line), " | "); len(cells) == 1+len(registry.All()) {
			rows[strings.TrimPrefix(cells[0], "| ")] = cells[1:]
		}
	}
	launch := engine.Launch{ModelPath: "/m", Ranks: 8, AttentionDP: true}
	refused := func(findings []engine.Finding) bool {
		return slices.ContainsFunc(findings, func(f engine.Finding) bool { return f.Reason != "NoAllToAll" })
	}
	for at, adapter := range registry.All() {
		plan := func(realization engine.Realization, copies int32) bool {
			with := launch
			with.RedundantExperts = copies
			return !refused(adapter.Support(engine.Situation{Realization: realization, Family: "qwen3_moe", Groups: 1, Launch: with}).Refusals)
		}
		overlapping := launch
		overlapping.Overlap.MicroBatches = 2
		overlaps := adapter.ValidateOverlap(engine.Situation{Launch: overlapping})
		for row, want := range map[string]bool{
			"`EngineMap`":                           plan(engine.EngineMap, 0),
			"`ReshuffledWeights`":                   plan(engine.ReshuffledWeights, 0),
			"redundant experts":                     plan(engine.EngineMap, 8),
			"requests for a rank":                   adapter.RankHeader != "",
			"experts of a request":                  adapter.ReportsRoutedExperts(),
			"[`engine.overlap`](engine-overlap.md)": overlaps == nil || !strings.Contains(overlaps.Error(), "has no flag"),
		} {
			if rows[row] == nil {
				t.Fatalf("docs/engines.md has no row %s", row)
			}
			if cell := rows[row][at]; strings.HasPrefix(cell, "no") == want {
				t.Errorf("docs/engines.md: %s of %s is %q, want support: %v", row, adapter.Type, cell, want)
			}
		}
		cell := strings.TrimSuffix(rows["[minimum release](engine-releases.md)"][at], " |")
		least := engine.ParseRelease(cell)
		before := engine.Release{Major: least.Major, Minor: least.Minor - 1, Patch: 99}
		if least.Patch > 0 {
			before = engine.Release{Major: least.Major, Minor: least.Minor, Patch: least.Patch - 1}
		}
		for release, want := range map[engine.Release]bool{least: false, before: true} {
			asked := launch
			asked.RoutedExperts = adapter.ReportsRoutedExperts()
			if refusals := adapter.StartupSupport(engine.Situation{Release: release, Launch: asked}).Refusals; len(refusals) > 0 != want {
				t.Errorf("docs/engines.md: minimum release of %s is %q, but %s is refused: %v", adapter.Type, cell, release, refusals)
			}
		}
	}
}

// TestGuideListsRanksByRoute compares the table in docs/engines.md with the adapters.
func TestGuideListsRanksByRoute(t *testing.T) {
	guide := readGuide(t, "engines.md")
	heading := "| route |"
	for _, a := range registry.All() {
		heading += " `" + a.Type + "` |"
	}
	if !strings.Contains(guide, heading+"\n") {
		t.Errorf("docs/engines.md has no heading %s", heading)
	}
	for _, route := range []string{"/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate", "/v1/responses"} {
		row := "| `" + route + "` |"
		for _, a := range registry.All() {
			switch header, field := a.OnRoute(route); {
			case !a.HasRoute(route):
				row += " – |"
			case field != "":
				row += " `" + field + "` |"
			case header != "":
				first := a.Oldest
				for _, r := range a.Routes {
					if r.Path == route && r.Pin == engine.ByHeader {
						first = r.First
					}
				}
				row += " header"
				if a.Oldest.Before(first) {
					row += " from " + first.String()
				}
				row += " |"
			default:
				row += " balanced by load |"
			}
		}
		if !strings.Contains(guide, row+"\n") {
			t.Errorf("docs/engines.md has no row %s", row)
		}
	}
}

func args(text string) func(*engine.Situation) {
	return func(s *engine.Situation) { s.UserArgs = strings.Fields(text) }
}

func ofFamily(name string) func(*engine.Situation) {
	return func(s *engine.Situation) { s.Family = name }
}

func wrapper(name string) func(*engine.Situation) {
	return func(s *engine.Situation) { s.Wrapper = name }
}

func quantization(name string) func(*engine.Situation) {
	return func(s *engine.Situation) { s.Quantization = name }
}

func of(changes ...func(*engine.Situation)) func(*engine.Situation) {
	return func(s *engine.Situation) {
		for _, change := range changes {
			change(s)
		}
	}
}

func release(text string) func(*engine.Situation) {
	return func(s *engine.Situation) { s.Release = engine.ParseRelease(text) }
}

func options(text string) func(*engine.Situation) {
	return func(s *engine.Situation) { s.Launch.Options = text }
}

func observed(s *engine.Situation) { s.Launch.RoutedExperts = true }

func copies(s *engine.Situation) { s.Launch.RedundantExperts = 8 }

func fixed(s *engine.Situation) { s.Unpermutable = `model.safetensors: tensor "x" has another shape` }

func groups(kept bool) func(*engine.Situation) {
	return func(s *engine.Situation) { s.Groups, s.KeepsGroups = 8, kept }
}

// TestAdvice checks that DeepEP is suggested only for models that can use it.
func TestAdvice(t *testing.T) {
	for name, want := range map[string]bool{"qwen3_moe": true, "mixtral": true, "gpt_oss": false} {
		for _, dataParallel := range []bool{true, false} {
			s := engine.Situation{Realization: engine.ReshuffledWeights, Family: name, Launch: engine.Launch{Ranks: 2, AttentionDP: dataParallel}}
			got := support(t, "SGLang", s)
			findings := slices.Concat(got.Refusals, got.Warnings)
			if len(findings) != 1 || findings[0].Reason != engine.ReasonNoAllToAll || strings.Contains(findings[0].Message, "Set --moe-a2a-backend, for example to deepep") != want {
				t.Errorf("%s: %+v", name, findings)
			}
		}
	}
}

// TestEveryFamilyIsDecided checks that every family is known to support SGLang's maps or not. A new family must be
// added here.
func TestEveryFamilyIsDecided(t *testing.T) {
	var refused []string
	for _, name := range family.Types() {
		s := engine.Situation{Realization: engine.EngineMap, Family: name, Launch: engine.Launch{Ranks: 2, AttentionDP: true}}
		if len(support(t, "SGLang", s).Refusals) > 0 {
			refused = append(refused, name)
		}
	}
	const want = "afmoe dots1 ernie4_5_moe gemma4_text glm4v_moe_text granitemoe granitemoehybrid granitemoeshared hunyuan_v1_moe kimi_linear lfm2_moe llama4_text longcat_flash " +
		"mixtral olmoe phimoe qwen3_omni_moe_text solar_open"
	if got := strings.Join(refused, " "); got != want {
		t.Errorf("SGLang refuses a map for %s", got)
	}
}
