// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"cmp"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/model/family"
)

// layerRule contains the fields of config.json that distinguish MoE layers from dense ones, in all spellings of known
// families. A layer is an MoE layer if an explicit list contains it, or, without a list, if no other field excludes it.
type layerRule struct {
	// Explicit lists.
	MLPTypes  []string        `json:"mlp_layer_types"`
	MoELayers []int           `json:"moe_layers"`              // Llama 4
	MoEEnum   json.RawMessage `json:"moe_layers_enum"`         // Step: a list, or numbers separated by commas
	Blocks    []string        `json:"layers_block_type"`       // Nemotron-H
	Pattern   string          `json:"hybrid_override_pattern"` // Nemotron-H: a letter for each layer
	// Numbers of dense layers at the beginning.
	DenseFirst  *int `json:"first_k_dense_replace"`
	DenseLayers *int `json:"num_dense_layers"`      // AFMoE, LFM2
	StartIndex  *int `json:"moe_layer_start_index"` // ERNIE
	EndIndex    *int `json:"moe_layer_end_index"`   // ERNIE: the last MoE layer
	// Steps: layer l is an MoE layer if the step divides l+1, or l for moe_layer_freq.
	SparseStep    *int            `json:"decoder_sparse_step"`       // Qwen
	Interleave    *int            `json:"interleave_moe_layer_step"` // Llama 4
	Interval      *int            `json:"moe_layer_interval"`        // ERNIE
	Frequency     json.RawMessage `json:"moe_layer_freq"`            // a step, or one flag per layer
	DenseOnly     []int           `json:"mlp_only_layers"`
	EnablesBlocks *bool           `json:"enable_moe_block"` // Gemma
}

// sparseTypes are the types of MoE layers in mlp_layer_types and layers_block_type, and in the pattern.
var sparseTypes = []string{"sparse", "moe", "hash_moe", "E"}

// listedLayers returns the number of entries of the lists with the type of each layer, and nil if there is no list.
func (r layerRule) listedLayers() *int {
	if n := cmp.Or(len(r.Blocks), len(r.Pattern)); n > 0 {
		return &n
	}
	return nil
}

// describesLayers reports whether the configuration contains a layer rule.
func (r layerRule) describesLayers() bool {
	return len(r.MLPTypes)+len(r.MoELayers)+len(r.MoEEnum)+len(r.Blocks)+len(r.Pattern)+len(r.Frequency)+len(r.DenseOnly) > 0 ||
		slices.ContainsFunc([]*int{r.DenseFirst, r.DenseLayers, r.StartIndex, r.EndIndex, r.SparseStep, r.Interleave, r.Interval}, func(field *int) bool { return field != nil })
}

// moeLayers returns the MoE layers of a model, in ascending order.
func (r layerRule) moeLayers(layers int, f *family.Family) ([]int, error) {
	if f.OptionalBlock && (r.EnablesBlocks == nil || !*r.EnablesBlocks) {
		return nil, nil
	}
	if listed, err := r.listed(layers); listed != nil || err != nil {
		return layersWhere(layers, func(l int) bool { return slices.Contains(listed, l) }), err
	}
	first := f.DenseFirst
	for _, field := range []*int{r.DenseFirst, r.DenseLayers, r.StartIndex} {
		first = orElse(field, first)
	}
	last := layers - 1
	if end := orElse(r.EndIndex, -1); end >= 0 {
		last = end
	}
	for _, step := range []struct {
		name  string
		value *int
	}{{"decoder_sparse_step", r.SparseStep}, {"interleave_moe_layer_step", r.Interleave}, {"moe_layer_interval", r.Interval}} {
		if orElse(step.value, 1) < 1 {
			return nil, Invalidf("%s is %d; it must be at least 1", step.name, *step.value)
		}
	}
	step, flags, err := r.frequency()
	switch {
	case err != nil || flags != nil && len(flags) != layers:
		return nil, Invalidf("moe_layer_freq is %.100s; it must be a number, or one 0 or 1 for each of %d layers", r.Frequency, layers)
	case step < 1:
		return nil, Invalidf("moe_layer_freq is %d; it must be at least 1", step)
	case flags != nil:
		first = orElse(r.DenseFirst, 0) // the flags replace the family's default
	}
	return layersWhere(layers, func(l int) bool {
		return l >= first && l <= last && l%step == 0 && (flags == nil || flags[l] != 0) && !slices.Contains(r.DenseOnly, l) &&
			(l+1)%orElse(r.SparseStep, 1) == 0 && (l+1)%orElse(r.Interleave, 1) == 0 && (l+1)%orElse(r.Interval, 1) == 0
	}), nil
}

// listed returns the layers of an explicit list, and nil if there is none. Entries of layers of multi-token prediction,
// which follow the hidden layers, are ignored.
func (r layerRule) listed(layers int) ([]int, error) {
	types, name := r.MLPTypes, "mlp_layer_types"
	if len(types) == 0 {
		types, name = r.Blocks, "layers_block_type"
	}
	if len(types) == 0 {
		types, name = strings.Split(r.Pattern, ""), "hybrid_override_pattern"
	}
	switch {
	case len(types) > 0 && len(types) < layers:
		return nil, Invalidf("%s has %d entries; it must have one for each of %d layers", name, len(types), layers)
	case len(types) > 0:
		list := []int{}
		for l, kind := range types {
			if slices.Contains(sparseTypes, kind) {
				list = append(list, l)
			}
		}
		return list, nil
	case r.MoELayers != nil:
		return r.MoELayers, nil
	case len(r.MoEEnum) == 0 || string(r.MoEEnum) == "null":
		return nil, nil
	}
	var list []int
	if json.Unmarshal(r.MoEEnum, &list) == nil {
		return list, nil
	}
	var text string
	if err := json.Unmarshal(r.MoEEnum, &text); err != nil {
		return nil, Invalidf("moe_layers_enum is %.100s; it must be a list of numbers", r.MoEEnum)
	}
	list = []int{}
	for number := range strings.SplitSeq(text, ",") {
		l, err := strconv.Atoi(strings.TrimSpace(number))
		if err != nil {
			return nil, Invalidf("moe_layers_enum is %.100s; it must be a list of numbers", r.MoEEnum)
		}
		list = append(list, l)
	}
	return list, nil
}

// frequency parses moe_layer_freq: a step, or one flag per layer. The trace package parses the same field in the same
// way. Without the field, the step is 1.
func (r layerRule) frequency() (step int, flags []int, err error) {
	step = 1
	if len(r.Frequency) > 0 && json.Unmarshal(r.Frequency, &step) != nil {
		step, err = 1, json.Unmarshal(r.Frequency, &flags)
	}
	return step, flags, err
}

func layersWhere(layers int, isMoE func(int) bool) []int {
	var list []int
	for l := range layers {
		if isMoE(l) {
			list = append(list, l)
		}
	}
	return list
}
