// SPDX-License-Identifier: Apache-2.0

package modelconfig

import (
	"strings"
	"testing"
)

func TestWeightBits(t *testing.T) {
	for text, want := range map[string]float64{
		`{"torch_dtype":"bfloat16"}`:                   16,
		`{"dtype":"torch.float16"}`:                    16,
		`{"torch_dtype":"float32","dtype":"bfloat16"}`: 16,
		`{}`:                                              32,
		`{"torch_dtype":null,"rope":NaN}`:                 32,
		`{"text_config":{"dtype":"bfloat16"}}`:            16,
		`{"dtype":"bfloat16","text_config":{}}`:           16,
		`{"dtype":"bfloat16","quantization_config":null}`: 16,
		`{"torch_dtype":"bfloat16","quantization_config":{"quant_method":"fp8","weight_block_size":[128,128],"modules_to_not_convert":["lm_head"]}}`:                                                     8 + 32.0/16384,
		`{"quantization_config":{"quant_method":"fp8"},"text_config":{"torch_dtype":"bfloat16"}}`:                                                                                                        8,
		`{"quantization_config":{"quant_method":"mxfp4","modules_to_not_convert":["model.layers.*.mlp.router"]}}`:                                                                                        4.25,
		`{"quantization_config":{"quant_method":"gptq","bits":4,"group_size":128,"dynamic":{"-:.*shared_expert.*":{}}}}`:                                                                                 4 + 20.0/128,
		`{"quantization_config":{"quant_method":"awq","bits":4,"group_size":-1}}`:                                                                                                                        4,
		`{"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4"}}`:                                                                                                                       4.5,
		`{"text_config":{"quantization_config":{"quant_method":"compressed-tensors","config_groups":{"group_0":{"targets":["Linear"],"weights":{"num_bits":4,"group_size":32}}},"ignore":["lm_head"]}}}`: 4.5,
	} {
		if got, err := WeightBits([]byte(text)); err != nil || got != want {
			t.Errorf("%s: %v bits, %v; want %v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		`[`:                   "not valid JSON",
		`{"dtype":"int3"}`:    `type "int3"`,
		`{"torch_dtype":[1]}`: "not valid JSON",
		`{"quantization_config":{"quant_method":"bitsandbytes","load_in_4bit":true}}`:        `method "bitsandbytes"`,
		`{"quantization_config":{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION"}}`: `method "modelopt/MIXED_PRECISION"`,
		`{"quantization_config":{"quant_method":"gptq","bits":4000}}`:                        `method "gptq"`,
		`{"quantization_config":{"quant_method":"gptq","bits":-4}}`:                          `method "gptq"`,
		`{"quantization_config":7}`: "quantization_config",
		`{"quantization_config":{"quant_method":"fp8","ignored_layers":["model.layers.3.mlp.experts.7.up_proj"]}}`: "differently",
	} {
		if bits, err := WeightBits([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v bits, %v; want an error with %q", text, bits, err, want)
		}
	}
}
