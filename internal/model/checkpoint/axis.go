// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/model/family"
)

// Axis describes where a tensor stores the values of each expert. The tensor is a grid of lanes: each expert has Outer
// lanes of Bits bits. Packed consecutive experts share a word. Expert e is at position Order[e%Packed] in its word; a
// nil Order means ascending order. Strides count words.
type Axis struct {
	Outer, Bits               int64
	Packed                    int64
	Order                     []int64
	ExpertStride, OuterStride int64
	// Fixed is the number of rows after those of the experts. They do not move.
	Fixed int
	// Numbers reports that the tensor is a list of expert numbers of Bits bits each, instead of a grid of lanes.
	Numbers bool
}

// rows returns the axis of a tensor with the experts in dimension 0.
func rows(rowBytes int64) Axis {
	return Axis{Outer: 1, Bits: 8 * rowBytes, Packed: 1, ExpertStride: 1}
}

// Rows reports whether the values of each expert are one contiguous range of whole bytes, in expert order.
func (a Axis) Rows() bool { return a.Outer == 1 && a.Packed == 1 && !a.Numbers }

// bit returns the bit position of a lane.
func (a Axis) bit(outer, expert int64) int64 {
	place := expert % a.Packed
	if a.Order != nil {
		place = a.Order[place]
	}
	return ((expert/a.Packed*a.ExpertStride+outer*a.OuterStride)*a.Packed + place) * a.Bits
}

// Permute writes src to dst. The lanes of expert e in dst are those of expert newToOld[e] in src. The axis must not be
// Rows, and lanes have at most 64 bits. Bits that belong to no expert are copied unchanged.
func (a Axis) Permute(dst, src []byte, newToOld []int) {
	copy(dst, src)
	if a.Numbers {
		toNew := make([]int, len(newToOld))
		for e, old := range newToOld {
			toNew[old] = e
		}
		for bit := int64(0); bit < int64(len(src))*8; bit += a.Bits {
			if expert := a.lane(src, bit); expert < uint64(len(toNew)) {
				a.setLane(dst, bit, uint64(toNew[expert]))
			}
		}
		return
	}
	for outer := range a.Outer {
		for e, old := range newToOld {
			a.setLane(dst, a.bit(outer, int64(e)), a.lane(src, a.bit(outer, int64(old))))
		}
	}
}

// SamePermuted reports whether, for every e, the lanes of expert e in got equal those of expert newToOld[e] in want. A list
// of expert numbers must contain only numbers of experts.
func (a Axis) SamePermuted(got, want []byte, newToOld []int) bool {
	if a.Numbers {
		for bit := int64(0); bit < int64(len(got))*8; bit += a.Bits {
			expert := a.lane(got, bit)
			if expert >= uint64(len(newToOld)) || uint64(newToOld[expert]) != a.lane(want, bit) {
				return false
			}
		}
		return true
	}
	for outer := range a.Outer {
		for e, old := range newToOld {
			if a.lane(got, a.bit(outer, int64(e))) != a.lane(want, a.bit(outer, int64(old))) {
				return false
			}
		}
	}
	return true
}

func (a Axis) lane(data []byte, bit int64) uint64 {
	if a.Bits < 8 {
		return uint64(data[bit/8]>>(bit%8)) & (1<<a.Bits - 1)
	}
	var word [8]byte
	copy(word[:a.Bits/8], data[bit/8:])
	return binary.LittleEndian.Uint64(word[:])
}

func (a Axis) setLane(data []byte, bit int64, value uint64) {
	if a.Bits < 8 {
		mask := byte(1<<a.Bits-1) << (bit % 8)
		data[bit/8] = data[bit/8]&^mask | byte(value)<<(bit%8)
		return
	}
	var word [8]byte
	binary.LittleEndian.PutUint64(word[:], value)
	copy(data[bit/8:], word[:a.Bits/8])
}

// gateForms lists the known tensors of a gate. rows: the tensor may have one row per expert. whole: the tensor may
// describe the whole gate in one value or one row. inputs: the tensor describes the gate's inputs or its shape.
var gateForms = map[string]struct{ rows, whole, inputs bool }{
	"weight":                           {rows: true},
	"bias":                             {rows: true},
	"e_score_correction_bias":          {rows: true},
	"weight_packed":                    {rows: true},
	"weight_offset":                    {rows: true, whole: true},
	"weight_zero_point":                {rows: true, whole: true},
	"weight_scale":                     {rows: true, whole: true},
	"weight_scale_inv":                 {rows: true, whole: true},
	"weight_quantizer._amax":           {rows: true, whole: true},
	"deq_scale":                        {rows: true},
	"quant_bias":                       {rows: true},
	"weight_scale_2":                   {whole: true},
	"weight_global_scale":              {whole: true},
	"input_scale":                      {whole: true},
	"input_offset":                     {whole: true},
	"input_global_scale":               {whole: true},
	"input_quantizer._amax":            {whole: true},
	"weight_shape":                     {inputs: true},
	"weight_g_idx":                     {inputs: true},
	"g_idx":                            {inputs: true},
	"pre_quant_scale":                  {inputs: true},
	"input_quantizer._pre_quant_scale": {inputs: true},
}

// axisOf returns the expert axis of a gate's tensor or a fused tensor. dependent is false for a tensor that does not
// depend on the order of the experts.
func (c *Checkpoint) axisOf(name string) (axis Axis, dependent bool, err error) {
	shard := c.shardOf[name]
	tensor, experts := shard.Tensors[name], int64(c.Config.Experts)
	part := c.Config.Classify(name)
	form, known := gateForms[part.Name]
	shape := tensor.Shape
	if kind, listed := c.Config.family().GateTensors[part.Name]; listed {
		if kind == family.ExpertNumbers {
			return c.expertNumbers(name)
		}
		form.rows, form.inputs, known = kind == family.Rows, kind == family.Inputs, true
		if len(shape) == 2 && shape[0] == 1 {
			shape = shape[1:] // ERNIE stores a matrix of one row
		}
	}
	if part.Role == Fused {
		scale := strings.Contains(part.Name, "scale") || strings.Contains(part.Name, "amax")
		form.rows, form.whole, form.inputs, known = true, scale, strings.HasSuffix(part.Name, "_shape"), true
	} else if packed, ok := c.packedColumns(name, part); ok {
		return packed, true, nil
	}
	size, lanes := tensor.End-tensor.Begin, experts
	if zero := int64(c.Config.ZeroExperts); part.Role == Gate || len(shape) > 0 && shape[0] == experts+zero {
		lanes += zero
	}
	switch {
	case part.Role == Gate && part.Name == "weight" && !slices.Contains(packedTypes, tensor.DType) && (len(shape) != 2 || shape[1] != int64(c.Config.HiddenSize)):
		return Axis{}, false, Invalidf("%s: gate %q has shape %v of %s; permuting the experts needs %d rows of %d inputs (hidden_size)",
			shard.Path, name, shape, tensor.DType, lanes, c.Config.HiddenSize)
	case part.Role == Fused && len(shape) < 3 && isFusedWeight(c.Config.family(), part.Name):
		return Axis{}, false, Invalidf("%s: tensor %q has shape %v; the weights of all experts of a layer need at least three dimensions", shard.Path, name, shape)
	case !known:
		return Axis{}, false, Invalidf("%s: the rows of gate tensor %q cannot be permuted: its format is not supported", shard.Path, name)
	case form.rows && len(shape) > 0 && shape[0] == lanes && size%lanes == 0:
		axis = rows(size / lanes)
		axis.Fixed = int(lanes - experts)
		return axis, true, nil
	case form.inputs && (strings.HasSuffix(part.Name, "_shape") || !slices.Contains(shape, lanes)):
		return Axis{}, false, nil
	case form.whole && (tensor.Elements() == 1 || len(shape) == 2 && shape[0] == 1 && shape[1] != lanes && part.Role == Gate):
		return Axis{}, false, nil
	}
	if form.inputs {
		return Axis{}, false, Invalidf("%s: tensor %q has shape %v, and a layer %d experts: its dependence on the order of the experts is unknown", shard.Path, name, shape, lanes)
	}
	return Axis{}, false, Invalidf("%s: tensor %q has shape %v of %s; permuting the experts needs %d rows, one for each expert",
		shard.Path, name, tensor.Shape, tensor.DType, lanes)
}

// packedTypes lists the types that contain several values of a weight.
var packedTypes = []DType{"U8", "I32", "F4"}

// isFusedWeight reports whether a fused tensor contains the weights of a projection.
func isFusedWeight(f *family.Family, name string) bool {
	return slices.ContainsFunc(slices.Concat(f.Fused...), func(s string) bool { return name == inFused(f, s) && !strings.HasSuffix(s, "bias") })
}

// expertNumbers returns the axis of a tensor whose values are expert numbers.
func (c *Checkpoint) expertNumbers(name string) (Axis, bool, error) {
	tensor, _ := c.Tensor(name)
	bits := dtypeBits[tensor.DType]
	if !slices.Contains([]DType{"U8", "I16", "U16", "I32", "U32", "I64", "U64"}, tensor.DType) || tensor.End-tensor.Begin > maxPackedBytes {
		return Axis{}, false, Invalidf("%s: tensor %q has shape %v of %s; expert numbers need an integer type and at most %d bytes",
			c.shardOf[name].Path, name, tensor.Shape, tensor.DType, maxPackedBytes)
	}
	return Axis{Bits: bits, Numbers: true}, true, nil
}

// awqOrder is the position of each of eight consecutive experts in a word of AWQ.
var awqOrder = []int64{0, 4, 1, 5, 2, 6, 3, 7}

// maxPackedBytes is the maximum size of a tensor in which experts are not rows. Such tensors are read as a whole. Gates
// of known models have less than 2 MiB.
const maxPackedBytes = 32 << 20

// packedColumns returns the axis of a quantised gate tensor in which experts are not rows. In GPTQ and AWQ, the last
// dimension is the expert. compressed-tensors packs zero points along the experts. The shape of the gate's weight
// distinguishes GPTQ, [inputs/8, experts], from AWQ, [inputs, experts/8].
func (c *Checkpoint) packedColumns(name string, part Part) (Axis, bool) {
	tensor, _ := c.Tensor(name)
	if len(tensor.Shape) != 2 || tensor.End-tensor.Begin > maxPackedBytes {
		return Axis{}, false
	}
	experts, inputs := int64(c.Config.Experts), int64(c.Config.HiddenSize)
	first, last := tensor.Shape[0], tensor.Shape[1]
	module := strings.TrimSuffix(name, part.Name)
	columns := Axis{Outer: first, Packed: 1, ExpertStride: 1, OuterStride: experts, Bits: dtypeBits[tensor.DType]}
	weight, quantized := c.Tensor(module + "qweight")
	if part.Name == "weight_zero_point" && tensor.DType == "I32" {
		words, ok := c.Tensor(module + "weight_packed")
		if !ok || len(words.Shape) != 2 || inputs == 0 || words.Shape[1]*32%inputs != 0 {
			return Axis{}, false
		}
		bits := words.Shape[1] * 32 / inputs
		if !slices.Contains([]int64{1, 2, 4, 8}, bits) || first != (experts*bits+31)/32 {
			return Axis{}, false
		}
		return Axis{Outer: last, Bits: bits, Packed: 32 / bits, ExpertStride: last, OuterStride: 1}, true
	}
	if !quantized || len(weight.Shape) != 2 || weight.DType != "I32" || inputs == 0 {
		return Axis{}, false
	}
	rows, cols := weight.Shape[0], weight.Shape[1]
	var bits int64
	var order []int64
	switch gptq, awq := cols == experts && rows*32%inputs == 0, rows == inputs && cols*8 == experts; {
	case gptq == awq:
		return Axis{}, false
	case gptq:
		bits = rows * 32 / inputs
	default:
		bits, order = 4, awqOrder
	}
	if !slices.Contains([]int64{2, 4, 8}, bits) {
		return Axis{}, false
	}
	packed := Axis{Outer: first, Bits: bits, Packed: 32 / bits, Order: order, ExpertStride: 1, OuterStride: last}
	switch {
	case part.Name == "qweight" && order == nil, part.Name == "scales" && last == experts:
		return columns, true
	case part.Name == "qweight", part.Name == "qzeros" && tensor.DType == "I32" && last*32 == experts*bits:
		return packed, true
	}
	return Axis{}, false
}
