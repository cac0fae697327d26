// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// maxPermutationBytes is the maximum size of the permutation file. 512 layers of 1,024 experts need 3 MB.
const maxPermutationBytes = 64 << 20

// Permutation is the new order of the experts in some layers. Layers that are not listed stay unchanged.
type Permutation struct {
	Layers []LayerPermutation `json:"layers"`
}

// LayerPermutation is the permutation of one layer: new expert j is old expert NewToOld[j].
type LayerPermutation struct {
	// Layer is the model layer index.
	Layer    int   `json:"layer"`
	NewToOld []int `json:"new_to_old"`
}

// ReadPermutation reads a gate-permutation.json and requires that each layer in it is a permutation. An invalid file
// returns a *checkpoint.InvalidError.
func ReadPermutation(path string) (*Permutation, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return nil, checkpoint.Invalidf("permutation file: %v", err)
	case err != nil:
		return nil, fmt.Errorf("permutation file: %w", err)
	case !info.Mode().IsRegular() || info.Size() > maxPermutationBytes:
		return nil, checkpoint.Invalidf("permutation file %s is not a regular file of at most %d bytes", path, maxPermutationBytes)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("permutation file: %w", err)
	}
	p, err := ParsePermutation(text)
	if err != nil {
		return nil, checkpoint.Invalidf("%s: %v", path, err)
	}
	return p, nil
}

// ParsePermutation parses the text of a gate-permutation.json.
func ParsePermutation(text []byte) (*Permutation, error) {
	var file struct {
		Layers *[]struct {
			Layer    *int  `json:"layer"`
			NewToOld []int `json:"new_to_old"`
		} `json:"layers"`
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(&file)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		return nil, checkpoint.Invalidf(`not a gate permutation: %s is a JSON %s; it must be as in {"layers":[{"layer":1,"new_to_old":[1,0]}]}`,
			cmp.Or(strings.Trim(wrong.Field, "."), "the text"), wrong.Value)
	case err != nil:
		return nil, checkpoint.Invalidf("not a gate permutation: %v", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, checkpoint.Invalidf("not a gate permutation: text after the JSON object")
	}
	if file.Layers == nil {
		return nil, checkpoint.Invalidf("not a gate permutation: layers is missing")
	}
	p := &Permutation{}
	for i, layer := range *file.Layers {
		if layer.Layer == nil || layer.NewToOld == nil {
			return nil, checkpoint.Invalidf("layers[%d] needs layer and new_to_old", i)
		}
		p.Layers = append(p.Layers, LayerPermutation{*layer.Layer, layer.NewToOld})
	}
	return p, p.validate()
}

// validate requires that each layer is listed at most once and is a permutation.
func (p *Permutation) validate() error {
	seen := map[int]bool{}
	for _, layer := range p.Layers {
		if layer.Layer < 0 || seen[layer.Layer] {
			return checkpoint.Invalidf("layer %d is negative or listed twice", layer.Layer)
		}
		seen[layer.Layer] = true
		at := make([]int, len(layer.NewToOld))
		for j, old := range layer.NewToOld {
			if old < 0 || old >= len(at) {
				return checkpoint.Invalidf("layer %d: new_to_old[%d] is %d; allowed is 0 to %d", layer.Layer, j, old, len(at)-1)
			}
			if at[old] > 0 {
				return checkpoint.Invalidf("layer %d: new_to_old is not a permutation: value %d is at both %d and %d", layer.Layer, old, at[old]-1, j)
			}
			at[old] = j + 1
		}
	}
	return nil
}

// invert returns the inverse of a permutation.
func invert(permutation []int) []int {
	inverse := make([]int, len(permutation))
	for j, old := range permutation {
		inverse[old] = j
	}
	return inverse
}

// canonical returns a permutation of only the layers that change, in ascending order.
func (p *Permutation) canonical() *Permutation {
	out := &Permutation{Layers: []LayerPermutation{}}
	for _, layer := range p.Layers {
		if !slices.IsSorted(layer.NewToOld) {
			out.Layers = append(out.Layers, layer)
		}
	}
	slices.SortFunc(out.Layers, func(a, b LayerPermutation) int { return cmp.Compare(a.Layer, b.Layer) })
	return out
}

// Digest returns the sha256, in hex, of the permutation's canonical JSON. The order of the layers and unchanged layers
// do not affect it.
func (p *Permutation) Digest() string {
	text, err := json.Marshal(p.canonical())
	if err != nil {
		panic(err) // integers and slices always encode
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// checkGroups requires that a permutation maps each group of consecutive experts onto one group. With any other
// permutation, a gate that first chooses groups would choose different groups.
func checkGroups(layer LayerPermutation, groups int) error {
	size := len(layer.NewToOld) / groups
	for j, old := range layer.NewToOld {
		if first := layer.NewToOld[j-j%size]; old/size != first/size {
			return checkpoint.Invalidf("layer %d: new group %d has experts %d and %d of the old groups %d and %d; the gate chooses among %d groups of %d experts, "+
				"so a permutation must keep groups whole: solve with --preserve-groups, or use the engine's expert map",
				layer.Layer, j/size, first, old, first/size, old/size, groups, size)
		}
	}
	return nil
}
