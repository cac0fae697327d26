// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/binary"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
)

// TestPackedAxes packs the scores of a gate's experts in each known format, permutes the words, and unpacks them again.
func TestPackedAxes(t *testing.T) {
	const inputs, groups = 16, 2
	for name, test := range map[string]struct {
		experts int
		tensor  string
		shape   []int64
		others  map[string][]int64
		// at returns the word and the shift of a value. bits is the width of the value.
		at   func(row, expert int) (word, shift int)
		bits int
		rows int
	}{
		"qweight of GPTQ": {16, "qweight", []int64{2, 16}, nil, func(row, expert int) (int, int) { return row/8*16 + expert, 4 * (row % 8) }, 4, inputs},
		"qzeros of GPTQ": {16, "qzeros", []int64{groups, 2}, map[string][]int64{"qweight": {2, 16}},
			func(row, expert int) (int, int) { return row*2 + expert/8, 4 * (expert % 8) }, 4, groups},
		"qzeros of GPTQ, 8 bits": {16, "qzeros", []int64{groups, 4}, map[string][]int64{"qweight": {4, 16}},
			func(row, expert int) (int, int) { return row*4 + expert/4, 8 * (expert % 4) }, 8, groups},
		"qweight of AWQ": {16, "qweight", []int64{inputs, 2}, nil, func(row, expert int) (int, int) {
			return row*2 + expert/8, 4 * slices.Index([]int{0, 2, 4, 6, 1, 3, 5, 7}, expert%8)
		}, 4, inputs},
		"zero points of compressed-tensors": {12, "weight_zero_point", []int64{2, groups}, map[string][]int64{"weight_packed": {12, 2}},
			func(row, expert int) (int, int) { return expert/8*groups + row, 4 * (expert % 8) }, 4, groups},
	} {
		t.Run(name, func(t *testing.T) {
			const gate = "model.layers.0.mlp.gate."
			header := &Header{Tensors: map[string]Tensor{}}
			add := func(name string, shape []int64) {
				size := 4 * shape[0] * shape[1]
				header.Tensors[gate+name] = Tensor{DType: "I32", Shape: shape, Begin: 0, End: size}
			}
			add(test.tensor, test.shape)
			for name, shape := range test.others {
				add(name, shape)
			}
			file := &File{Header: *header, Path: filepath.Join(t.TempDir(), "x")}
			c := &Checkpoint{Config: &Config{ModelType: "qwen3_moe", Layers: 1, Experts: test.experts, HiddenSize: inputs}, shardOf: map[string]*File{}}
			for name := range header.Tensors {
				c.shardOf[name] = file
			}
			axis, dependent, err := c.axisOf(gate + test.tensor)
			if err != nil || !dependent || axis.Rows() {
				t.Fatalf("%+v, %t, %v", axis, dependent, err)
			}
			rng := rand.New(rand.NewPCG(1, 2))
			data, permuted := make([]byte, 4*test.shape[0]*test.shape[1]), make([]byte, 4*test.shape[0]*test.shape[1])
			for i := range data {
				data[i] = byte(rng.Uint32())
			}
			value := func(data []byte, row, expert int) uint32 {
				word, shift := test.at(row, expert)
				return binary.LittleEndian.Uint32(data[4*word:]) >> shift & (1<<test.bits - 1)
			}
			newToOld := rng.Perm(test.experts)
			axis.Permute(permuted, data, newToOld)
			for row := range test.rows {
				for e, old := range newToOld {
					if got, want := value(permuted, row, e), value(data, row, old); got != want {
						t.Fatalf("row %d of expert %d is %d, want %d of expert %d", row, e, got, want, old)
					}
				}
			}
			if !axis.SamePermuted(permuted, data, newToOld) {
				t.Error("the permuted result is not recognised")
			}
			permuted[0] ^= 1
			if axis.SamePermuted(permuted, data, newToOld) {
				t.Error("a changed bit is not detected")
			}
		})
	}
}
