// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func TestCopyRuleByHand(t *testing.T) {
	for _, test := range []struct {
		rule  placement.CopyRule
		hosts []int
		used  []int // by ranks 0 to 4
	}{
		{placement.NearestCopy, []int{3}, []int{3, 3, 3, 3, 3}},
		{placement.NearestCopy, []int{1, 2}, []int{1, 1, 2, 1, 1}},
		{placement.RankModuloCopy, []int{3}, []int{3, 3, 3, 3, 3}},
		{placement.RankModuloCopy, []int{0, 3}, []int{0, 3, 0, 3, 0}},
		{placement.RankModuloCopy, []int{1, 2}, []int{1, 2, 1, 2, 1}}, // neither rank uses its own copy
		{placement.RankModuloCopy, []int{0, 1, 4}, []int{0, 1, 4, 0, 1}},
	} {
		var used []int
		for rank := range test.used {
			used = append(used, test.rule.Copy(test.hosts, rank))
		}
		if diff := cmp.Diff(test.used, used); diff != "" {
			t.Errorf("rule %q, copies on %v:\n%s", test.rule, test.hosts, diff)
		}
	}
	p := &placement.Placement{Ranks: 3, Experts: 3, SlotsPerRank: 2, CopyRule: placement.RankModuloCopy, Layers: []placement.Layer{{Slots: []int{0, 1, 0, 2, 1, 2}}}}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	// Expert 0 is on ranks 0 and 1, expert 1 on 0 and 2, expert 2 on 1 and 2.
	if diff := cmp.Diff([][]int{{0, 1}, {0}, nil}, p.Local(0)); diff != "" {
		t.Error(diff)
	}
	for _, name := range placement.CopyRules {
		if _, err := placement.ParseCopyRule(name); err != nil {
			t.Error(err)
		}
	}
	p.CopyRule = "random"
	if err := p.Validate(); err == nil {
		t.Error("an unknown rule is valid")
	}
}

// TestSolveObeysTheCopyRule solves for the rule: the placement is valid, more activations are local than with a
// placement for a different rule, and the result of every algorithm with copies contains the rule.
func TestSolveObeysTheCopyRule(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	hosted := func(p *placement.Placement) (local, all int) {
		for l := range p.Layers {
			for e, hosts := range p.Hosts(l) {
				all += len(hosts)
				local += len(p.Local(l)[e])
			}
		}
		return local, all
	}
	for _, algorithm := range []placement.Algorithm{placement.Auto, placement.EPLB, placement.ContiguousAlgorithm, placement.RoundRobinAlgorithm} {
		p := problem(t, tr, placement.DataParallel, 4)
		p.Algorithm, p.RedundantSlots = algorithm, 2
		other, err := placement.Solve(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		p.CopyRule = placement.RankModuloCopy
		result, err := placement.Solve(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		if err := result.Placement.Validate(); err != nil || result.Placement.CopyRule != p.CopyRule {
			t.Fatalf("%s: rule %q, %v", algorithm, result.Placement.CopyRule, err)
		}
		before := *other.Placement
		before.CopyRule = p.CopyRule
		was, wasAll := hosted(&before)
		local, all := hosted(result.Placement)
		t.Logf("%s: %d of %d slots are used by their ranks, before %d of %d", algorithm, local, all, was, wasAll)
		if all != wasAll || local <= was {
			t.Errorf("%s: %d of %d slots are used by their ranks, before %d of %d", algorithm, local, all, was, wasAll)
		}
		again, err := placement.Solve(t.Context(), p)
		if err != nil || !slices.EqualFunc(again.Placement.Layers, result.Placement.Layers, func(a, b placement.Layer) bool { return slices.Equal(a.Slots, b.Slots) }) {
			t.Errorf("%s: another placement the second time, %v", algorithm, err)
		}
	}
}
