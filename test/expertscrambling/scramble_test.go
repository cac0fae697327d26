// SPDX-License-Identifier: Apache-2.0

package expertscrambling

import (
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/trace"
)

func small() *trace.Trace {
	return &trace.Trace{
		Model:  trace.Model{Experts: 8, TopK: 2, Layers: []int{0, 3}},
		Tokens: []int32{7, 7, 9}, Offsets: []int64{0, 3},
		Experts:   []uint16{0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7},
		LookAhead: &trace.LookAhead{},
	}
}

// TestExperts checks that each layer's experts get distinct new numbers, and that the seed determines the numbers.
func TestExperts(t *testing.T) {
	made := small()
	Experts(made, 1)
	if made.LookAhead != nil {
		t.Error("the look-ahead with the original expert numbers is still present")
	}
	renumbered := make([]map[uint16]uint16, 2)
	for layer := range renumbered {
		renumbered[layer] = map[uint16]uint16{}
	}
	taken := [2][]uint16{}
	for i, expert := range small().Experts {
		layer := i / 2 % 2
		known, has := renumbered[layer][expert]
		switch {
		case has && known != made.Experts[i]:
			t.Errorf("expert %d of layer %d has two new numbers, %d and %d", expert, layer, known, made.Experts[i])
		case !has && slices.Contains(taken[layer], made.Experts[i]):
			t.Errorf("two experts of layer %d have the new number %d", layer, made.Experts[i])
		}
		renumbered[layer][expert] = made.Experts[i]
		taken[layer] = append(taken[layer], made.Experts[i])
	}
	if slices.Equal(made.Experts, small().Experts) {
		t.Error("no expert is renumbered")
	}
	again, other := small(), small()
	Experts(again, 1)
	Experts(other, 2)
	if !slices.Equal(made.Experts, again.Experts) || slices.Equal(made.Experts, other.Experts) {
		t.Error("the new numbers are not determined by the seed")
	}
}
