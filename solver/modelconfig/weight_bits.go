// SPDX-License-Identifier: Apache-2.0

package modelconfig

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// storedBits are the bits of a weight by the type in a configuration (torch_dtype, later dtype).
var storedBits = map[string]float64{
	"float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
}

// unnamedBits are the bits without a configured type: transformers then uses float32, which is also the largest type.
const unnamedBits = 32

// quantized is the part of a quantization_config that determines the size of a weight.
type quantized struct {
	Method    string `json:"quant_method"`
	Algorithm string `json:"quant_algo"`
	Bits      int    `json:"bits"`
	GroupSize int    `json:"group_size"`
	// BlockSize contains the rows and columns of weights that share a scale.
	BlockSize []int `json:"weight_block_size"`
	// Groups are the groups of compressed-tensors.
	Groups map[string]struct {
		Targets []string `json:"targets"`
		Weights *struct {
			Bits      int    `json:"num_bits"`
			GroupSize int    `json:"group_size"`
			Type      string `json:"type"`
		} `json:"weights"`
	} `json:"config_groups"`
	// Modules that are not quantized, or quantized differently.
	Ignore       []string                   `json:"ignore"`
	Ignored      []string                   `json:"ignored_layers"`
	NotConverted []string                   `json:"modules_to_not_convert"`
	Excluded     []string                   `json:"exclude_modules"`
	Dynamic      map[string]json.RawMessage `json:"dynamic"`
}

// WeightBits returns the bits that a weight of a routed expert occupies in memory, including scales, by the text of a
// config.json. Without a type, float32 is assumed. It returns an error if the quantization of experts is unknown.
func WeightBits(text []byte) (float64, error) {
	var config struct {
		DType        string          `json:"dtype"`
		TorchDType   string          `json:"torch_dtype"`
		Quantization json.RawMessage `json:"quantization_config"`
	}
	bits := 0.0
	for text = Strict(text); len(text) > 0; {
		// In a wrapper, either member may belong to the inner model.
		if err := json.Unmarshal(text, &config); err != nil {
			return 0, fmt.Errorf("the model's configuration is not valid JSON: %w", err)
		}
		if name := strings.TrimPrefix(cmp.Or(config.DType, config.TorchDType), "torch."); name != "" {
			known := storedBits[name]
			if known == 0 {
				return 0, fmt.Errorf("weight type %.40q of the model's configuration has an unknown size", name)
			}
			bits = known
		}
		_, text = Inner(text)
	}
	if len(config.Quantization) == 0 || string(config.Quantization) == "null" {
		return cmp.Or(bits, unnamedBits), nil
	}
	var q quantized
	if err := json.Unmarshal(config.Quantization, &q); err != nil {
		return 0, fmt.Errorf("quantization_config of the model's configuration: %w", err)
	}
	return q.weightBits()
}

// weightBits returns the bits of a weight including its part of the scales.
func (q *quantized) weightBits() (float64, error) {
	if name := q.exceptedExperts(); name != "" {
		return 0, fmt.Errorf("quantization_config of the model's configuration quantizes %.100q differently: the size of an expert is unknown", name)
	}
	const scale16, scale8, scale32 = 16, 8, 32
	bits := 0.0
	switch method := strings.ToLower(q.Method); {
	case method == "fp8":
		bits = 8
		if len(q.BlockSize) == 2 && q.BlockSize[0] > 0 && q.BlockSize[1] > 0 {
			bits += scale32 / (float64(q.BlockSize[0]) * float64(q.BlockSize[1]))
		}
	case method == "mxfp4":
		bits = 4 + scale8/32.0 // OCP Microscaling Formats v1.0: 32 elements share a scale of 8 bits
	case method == "gptq" || method == "awq":
		bits = withScale(q.Bits, q.GroupSize, scale16+float64(q.Bits)) // a scale and a zero point
	case strings.HasPrefix(method, "modelopt") && q.Algorithm == "FP8":
		bits = 8
	case strings.HasPrefix(method, "modelopt") && q.Algorithm == "NVFP4":
		bits = 4 + scale8/16.0
	case method == "compressed-tensors":
		for _, group := range q.Groups {
			if w := group.Weights; w != nil {
				bits = max(bits, withScale(w.Bits, w.GroupSize, scale16))
			}
		}
	}
	if bits <= 0 || bits > unnamedBits {
		return 0, fmt.Errorf("quantization_config of the model's configuration has method %.40q: the size of a weight is unknown", strings.Trim(q.Method+"/"+q.Algorithm, "/"))
	}
	return bits, nil
}

// withScale returns the bits of a weight if a group of weights shares a scale.
func withScale(bits, group int, scale float64) float64 {
	if group > 0 {
		return float64(bits) + scale/float64(group)
	}
	return float64(bits)
}

// exceptedExperts returns the name of a module of routed experts that is quantized differently from the others, or an
// empty string.
func (q *quantized) exceptedExperts() string {
	names := slices.Concat(q.Ignore, q.Ignored, q.NotConverted, q.Excluded, slices.Sorted(maps.Keys(q.Dynamic)))
	if len(q.Groups) > 1 {
		for _, group := range slices.Sorted(maps.Keys(q.Groups)) {
			names = append(names, q.Groups[group].Targets...)
		}
	}
	for _, name := range names {
		if strings.Contains(sharedExpert.ReplaceAllString(name, ""), "expert") {
			return name
		}
	}
	return ""
}
