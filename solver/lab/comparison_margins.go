// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
)

// BaselineMargin compares our method with one baseline over all cells. A cell is one EP size, one seed, and one forecast and
// dispatch policy.
type BaselineMargin struct {
	Attention placement.Attention `json:"attention"`
	// Baseline is another placement under our forecast and dispatch policy, or another dispatch policy on our
	// placement.
	Baseline string `json:"baseline"`
	// Cells is the number of compared cells. Ahead is the number of cells in which our local activation rate is higher.
	Cells int `json:"cells"`
	Ahead int `json:"ahead"`
	// Min is the minimum difference of the two local activation rates, ours minus the baseline's, over all cells.
	// LeastAt names its cell. Mean is the mean difference.
	Min   float64 `json:"least_lead"`
	MinAt string  `json:"least_lead_at"`
	Mean  float64 `json:"mean_lead"`
	// OurImbalance and BaselineImbalance are the means of the token loads' max/mean: in windows with attention DP, over
	// a whole run with attention TP. They show whether a higher rate costs balance.
	OurImbalance      float64 `json:"our_imbalance"`
	BaselineImbalance float64 `json:"baseline_imbalance"`
}

// BaselineMargins compares Auto with every baseline among comparisons, in order of first appearance. Both sides have the same
// number of extra slots.
func BaselineMargins(comparisons []Comparison) []BaselineMargin {
	var leads []BaselineMargin
	for i := range comparisons {
		theirs := &comparisons[i]
		name, ours := matchingComparison(comparisons, theirs)
		if ours == nil {
			continue
		}
		at := 0
		for at < len(leads) && (leads[at].Attention != theirs.Attention || leads[at].Baseline != name) {
			at++
		}
		if at == len(leads) {
			leads = append(leads, BaselineMargin{Attention: theirs.Attention, Baseline: name})
		}
		leads[at].add(theirs, ours)
	}
	for i := range leads {
		n := float64(leads[i].Cells)
		leads[i].Mean /= n
		leads[i].OurImbalance /= n
		leads[i].BaselineImbalance /= n
	}
	return leads
}

func (l *BaselineMargin) add(theirs, ours *Comparison) {
	for seed, lar := range theirs.LAR.Seeds {
		lead := ours.LAR.Seeds[seed] - lar
		if l.Cells == 0 || lead < l.Min {
			l.Min = lead
			l.MinAt = fmt.Sprintf("EP %d, split %d, %s, %s", theirs.Ranks, seed+1, theirs.Forecast, theirs.Dispatch)
		}
		l.Cells++
		l.Mean += lead
		l.OurImbalance += ours.balance()
		l.BaselineImbalance += theirs.balance()
		if lead > 0 {
			l.Ahead++
		}
	}
}

// balance returns the imbalance of the attention mode.
func (c *Comparison) balance() float64 {
	if c.Attention == placement.DataParallel {
		return c.WindowImbalance
	}
	return c.TokenImbalance
}

// matchingComparison returns the name of the baseline that a comparison represents, and our comparison to compare it
// with, or nil if it represents no baseline.
func matchingComparison(all []Comparison, of *Comparison) (name string, ours *Comparison) {
	want := *of
	want.Algorithm = placement.Auto
	switch {
	case of.ownLabels():
		// The published algorithm with its own tables and dispatch policy is compared with our placement, table and
		// dispatch policy.
		name = fmt.Sprintf("placement %s, %s, dispatch %s", of.Algorithm, of.Forecast, of.Dispatch)
		want.Forecast = string(solver.Table)
		if of.Attention == placement.DataParallel {
			want.Dispatch = string(dispatch.Price)
		}
	case of.Dispatch == string(dispatch.Late):
		return "", nil // our own method with all parts
	case of.Algorithm != placement.Auto && of.informed():
		name = "placement " + string(of.Algorithm)
	case of.Part == NeitherPart:
		name = "placement contiguous, dispatch round-robin"
	case of.Part == PlacementPart || of.Part == BothParts && of.Attention == placement.DataParallel:
		name = "our placement, dispatch " + of.Dispatch
		if of.Forecast != string(solver.Table) {
			name = "our placement, forecast " + of.Forecast
		}
	default:
		return "", nil
	}
	if !of.informed() || of.Algorithm == placement.Auto {
		want.Forecast, want.Dispatch = string(solver.Table), string(dispatch.Price)
		if of.Attention == placement.TensorParallel {
			want.Dispatch = string(cost.EqualShards)
		}
	}
	if want.RedundantSlots > 0 {
		name += fmt.Sprintf(", %d extra slots", want.RedundantSlots)
	}
	for i := range all {
		if all[i].sameMethod(want) && &all[i] != of {
			return name, &all[i]
		}
	}
	return "", nil
}
