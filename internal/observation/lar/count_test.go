// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/placement"
)

// Shape: one dense layer and five MoE layers with four experts, two per token, on two ranks.
var shape = Shape{Layers: 6, MoELayers: []int{1, 2, 3, 4, 5}, Experts: 4, ExpertsPerToken: 2, Hidden: 128}

func TestCountActivations(t *testing.T) {
	at, err := Contiguous(shape, 2, 0) // experts 0 and 1 are local
	if err != nil {
		t.Fatal(err)
	}
	// The IDs of the dense layer are ignored; 4 and 7 are shared experts; -1 is none.
	token := []int32{
		9, 9,
		0, 1, // both local
		0, 2, // one remote
		2, 3, // two remote on one rank
		1, 4, // the shared expert does not count
		7, -1,
	}
	got, err := CountActivations(append(append([]int32{}, token...), token...), shape, at, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := Count{
		Activations: Activations{Local: 8, Total: 14},
		// Five layers in four groups: the first has two.
		LayerGroups: []Activations{{6, 8}, {0, 4}, {2, 2}, {}},
		Tokens:      2, TokenLayers: 10, RemoteRanks: 4,
		SavedBytes: (8 - 7) * (128 + 4 + 256),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("count (-want +got):\n%s", diff)
	}
}

// A copy on the rank makes an activation local if the engine's rule uses it. With several copies on other ranks, one is
// counted as remote.
func TestCountCopies(t *testing.T) {
	one := Shape{Layers: 1, MoELayers: []int{0}, Experts: 3, ExpertsPerToken: 3}
	hosts := [][]int{{0, 1}, {1, 2}, {2}}
	for rule, wanted := range map[placement.CopyRule][]Count{
		placement.NearestCopy: {
			{Activations: Activations{1, 3}, RemoteRanks: 2},
			{Activations: Activations{2, 3}, RemoteRanks: 1},
			{Activations: Activations{2, 3}, RemoteRanks: 1},
		},
		placement.RankModuloCopy: {
			{Activations: Activations{1, 3}, RemoteRanks: 2},
			{Activations: Activations{1, 3}, RemoteRanks: 1},
			{Activations: Activations{1, 3}, RemoteRanks: 2},
		},
	} {
		for rank, want := range wanted {
			want.LayerGroups, want.Tokens, want.TokenLayers = []Activations{want.Activations}, 1, 1
			at := Locality{Rank: rank, Ranks: 3, Hosts: func(_, expert int) []int { return hosts[expert] }, CopyRule: rule}
			got, err := CountActivations([]int32{0, 1, 2}, one, at, nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("rule %q, rank %d (-want +got):\n%s", rule, rank, diff)
			}
		}
	}
}

func TestRefusesWhatCannotBeCounted(t *testing.T) {
	at, err := Contiguous(shape, 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := CountActivations(make([]int32, 12), shape, Locality{Rank: 2, Ranks: 2, Hosts: at.Hosts}, nil); err == nil {
		t.Error("rank 2 of 2 was counted")
	}
	for name, s := range map[string]Shape{
		"no layers":    {MoELayers: []int{0}, Experts: 1, ExpertsPerToken: 1},
		"no MoE layer": {Layers: 1, Experts: 1, ExpertsPerToken: 1},
		"layer beyond": {Layers: 1, MoELayers: []int{1}, Experts: 1, ExpertsPerToken: 1},
		"hidden":       {Layers: 1, MoELayers: []int{0}, Experts: 1, ExpertsPerToken: 1, Hidden: -1},
	} {
		if s.Validate() == nil {
			t.Errorf("%s: the shape is accepted", name)
		}
	}
}

// Layer groups are consecutive, differ by at most one layer, and cover all layers.
func TestLayerGroups(t *testing.T) {
	for layers := 1; layers <= 100; layers++ {
		s := Shape{MoELayers: make([]int, layers)}
		sizes := make([]int, s.groups())
		last := 0
		for i := range layers {
			group := s.Group(i)
			if group < last || group > last+1 {
				t.Fatalf("%d layers: layer %d is in group %d after %d", layers, i, group, last)
			}
			last = group
			sizes[group]++
		}
		for _, size := range sizes {
			if size < layers/len(sizes) || size > layers/len(sizes)+1 {
				t.Fatalf("%d layers: groups of %v", layers, sizes)
			}
		}
	}
}

// A row with a repeated expert was not recorded by the engine: its token and layers do not count.
func TestCountOmitsUnrecordedRows(t *testing.T) {
	at, err := Contiguous(shape, 2, 0)
	if err != nil {
		t.Fatal(err)
	}
	experts := []int32{9, 9, 0, 1, 0, 2, 2, 3, 1, 0, 3, 3} // the last layer contains one twice
	got, err := CountActivations(append(experts, make([]int32, 12)...), shape, at, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got.Tokens != 1 || got.TokenLayers != 4 || got.Total != 8 || got.Local != 5 || got.RemoteRanks != 2 {
		t.Errorf("%+v; want 5 of 8 activations of one token in 4 layers, with 2 remote ranks", got)
	}
}

func TestCountTable(t *testing.T) {
	shape := Shape{Layers: 3, MoELayers: []int{1, 2}, Experts: 4, ExpertsPerToken: 2}
	// Two tokens; layer 0 is dense. Ranks 0 and 1 hold experts 0, 1 and 2, 3.
	experts := []int32{9, 9, 0, 1, 2, 3, 7, 7, 0, 2, 1, 5}
	for name, tc := range map[string]struct {
		experts     []int32
		ranks, rank int
		want        Activations
		fails       bool
	}{
		"rank 0":                   {experts, 2, 0, Activations{4, 7}, false},
		"rank 1":                   {experts, 2, 1, Activations{3, 7}, false},
		"one rank":                 {experts, 1, 0, Activations{7, 7}, false},
		"nothing":                  {nil, 2, 0, Activations{}, false},
		"half a token":             {experts[:7], 2, 0, Activations{}, true},
		"no such rank":             {experts, 2, 2, Activations{}, true},
		"uneven ranks":             {experts, 3, 0, Activations{}, true},
		"no ranks":                 {experts, 0, 0, Activations{}, true},
		"negative expert":          {[]int32{0, 0, -1, 0, 0, 1}, 2, 0, Activations{3, 3}, false},
		"not filled by the engine": {append(make([]int32, 6), experts...), 2, 0, Activations{4, 7}, false},
		"one twice":                {[]int32{9, 9, 3, 3, 0, 2}, 2, 0, Activations{1, 2}, false},
		"no expert twice":          {[]int32{9, 9, -1, -1, 5, 5}, 2, 0, Activations{}, false},
	} {
		var got Count
		at, err := Contiguous(shape, tc.ranks, tc.rank)
		if err == nil {
			got, err = CountActivations(tc.experts, shape, at, nil)
		}
		if diff := cmp.Diff(tc.want, got.Activations); diff != "" || (err != nil) != tc.fails {
			t.Errorf("%s: error %v, (-want +got):\n%s", name, err, diff)
		}
	}
}
