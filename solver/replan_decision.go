// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"fmt"

	"github.com/semmoe/operator/solver/cost"
)

// Tier is a way to roll out a new plan. Tiers are ordered by cost, cheapest first.
type Tier string

// Supported tiers.
const (
	// NoTier keeps the plan in service.
	NoTier Tier = "none"
	// TablesTier gives routers new tables for the placement in service, without pod restarts.
	TablesTier Tier = "tables"
	// LayoutTier rolls out a new placement.
	LayoutTier Tier = "layout"
)

// Verdict is the reason for choosing a tier.
type Verdict string

// Possible verdicts.
const (
	Gain           Verdict = "Gain"
	NoGainExpected Verdict = "NoGainExpected"
	// LocalityDoesNotPay means that latency dominates: even a plan with only local activations would not gain enough.
	LocalityDoesNotPay Verdict = "LocalityDoesNotPay"
)

// ReplanPolicy is the policy for replacing the plan in service.
type ReplanPolicy struct {
	// BatchTokens are the batch sizes in service, in tokens over all ranks. Plans are compared by their mean time over
	// these sizes.
	BatchTokens []int
	// MinimumGainPercent is the minimum reduction of the modelled time of a MoE layer, in percent of the time under the
	// plan in service.
	MinimumGainPercent float64
	// TargetLAR is the local activation rate at which new tables suffice, regardless of the gain of a new placement; 0
	// means no target.
	TargetLAR float64
}

const (
	// DefaultMinimumGainPercent is the default of ReplanPolicy.MinimumGainPercent, the same as in the API.
	DefaultMinimumGainPercent = 2
	// tablesGainFraction is the minimum fraction of a new placement's time gain that new tables must reach to be
	// preferred to the new placement.
	tablesGainFraction = 0.95
)

// Check validates the policy.
func (c *ReplanPolicy) Check() error {
	if err := CheckBatchTokens(c.BatchTokens); err != nil {
		return err
	}
	if !(c.MinimumGainPercent >= 0 && c.MinimumGainPercent < 100) {
		return fmt.Errorf("minimum gain percent is %v; allowed is 0 to below 100", c.MinimumGainPercent)
	}
	if !(c.TargetLAR >= 0 && c.TargetLAR <= 1) {
		return fmt.Errorf("target LAR is %v; allowed is 0 to 1", c.TargetLAR)
	}
	return nil
}

// Score is the score of a plan on held-out requests. LAR is the local activation rate. Times are modelled times of a
// MoE layer. Imbalances are max/mean: TokenImbalance of tokens as the attention mode counts them, ExpertImbalance of
// expert computation.
type Score struct {
	LAR float64 `json:"lar"`
	cost.LayerTime
	TokenImbalance  float64 `json:"token_imbalance"`
	ExpertImbalance float64 `json:"expert_imbalance"`
}

func (s *Score) add(r *cost.Report, t cost.LayerTime, weight float64) {
	balance := r.TokenImbalance
	if r.WindowImbalance != nil {
		balance = *r.WindowImbalance
	} else if r.BatchImbalance != nil {
		balance = *r.BatchImbalance
	}
	s.LAR = min(1, s.LAR+weight*r.LAR) // rounding can exceed 1
	s.Exchange += weight * t.Exchange
	s.Compute += weight * t.Compute
	s.TokenImbalance += weight * balance
	s.ExpertImbalance += weight * r.ExpertWindowImbalance
}

// Decision is the chosen tier and the reason.
type Decision struct {
	Tier    Tier    `json:"tier"`
	Verdict Verdict `json:"verdict"`
	// Reason is one sentence for users.
	Reason string `json:"reason"`
	// TablesGainPercent and LayoutGainPercent are the modelled reductions in layer time relative to the plan in
	// service. MaxGainPercent is the reduction if every activation were local.
	TablesGainPercent float64 `json:"tables_gain_percent"`
	LayoutGainPercent float64 `json:"layout_gain_percent"`
	MaxGainPercent    float64 `json:"most_gain_percent"`
	// SavedPercent is the reduction in modelled time by the chosen plan. Low and High bound its 95% interval. All are
	// nil if no plan is chosen, or if the spread over documents is unknown.
	SavedPercent *float64 `json:"saved_percent,omitempty"`
	Low          *float64 `json:"saved_percent_low,omitempty"`
	High         *float64 `json:"saved_percent_high,omitempty"`
}

// confirm records the confidence interval of a gain, and revokes the decision if the gain is not significant.
func (d *Decision) confirm(w *Worth) {
	d.SavedPercent, d.Low, d.High = &w.SavedPercent, &w.Low, &w.High
	if w.Verdict != Gain {
		d.Tier, d.Verdict, d.Reason = NoTier, w.Verdict, w.Reason
	}
}

// Choose returns the cheapest tier with a sufficient gain, given the scores of the plan in service, of new tables and
// of a new placement, and the time in microseconds of a layer with only local activations.
func (c *ReplanPolicy) Choose(current, tables, layout Score, local float64) Decision {
	gain := func(us float64) float64 { return 100 * (1 - us/current.Total()) }
	d := Decision{
		Tier: NoTier, Verdict: NoGainExpected,
		TablesGainPercent: gain(tables.Total()), LayoutGainPercent: gain(layout.Total()), MaxGainPercent: gain(local),
	}
	least := c.MinimumGainPercent
	judge := func(saved float64) (Verdict, string) {
		return (&Finding{Saved: saved, Low: saved, Max: d.MaxGainPercent}).Judge(least)
	}
	ofTables, _ := judge(d.TablesGainPercent)
	ofLayout, reason := judge(d.LayoutGainPercent)
	tablesPay, layoutPays := ofTables == Gain, ofLayout == Gain
	switch {
	case ofLayout == LocalityDoesNotPay:
		d.Verdict, d.Reason = ofLayout, reason
	case tablesPay && c.TargetLAR > 0 && tables.LAR >= c.TargetLAR:
		d.take(TablesTier, "new tables restore the local activation rate to %.3f, the target is %.3f; a layer's modelled time falls by %.1f%%", tables.LAR, c.TargetLAR, d.TablesGainPercent)
	case tablesPay && d.TablesGainPercent >= tablesGainFraction*d.LayoutGainPercent:
		d.take(TablesTier, "new tables reduce a layer's modelled time by %.1f%%, a new placement by %.1f%%", d.TablesGainPercent, d.LayoutGainPercent)
	case layoutPays:
		d.take(LayoutTier, "a new placement reduces a layer's modelled time by %.1f%%, new tables by %.1f%%", d.LayoutGainPercent, d.TablesGainPercent)
	default:
		d.Reason = fmt.Sprintf("a new placement reduces a layer's modelled time by %.1f%%, new tables by %.1f%%; the minimum is %g%%", d.LayoutGainPercent, d.TablesGainPercent, least)
	}
	return d
}

func (d *Decision) take(t Tier, format string, args ...any) {
	d.Tier, d.Verdict, d.Reason = t, Gain, fmt.Sprintf(format, args...)
}

// localTime returns the mean time over batch sizes if every activation were local.
func localTime(l cost.Layer, batchTokens []int) float64 {
	sum := 0.0
	for _, tokens := range batchTokens {
		sum += l.LocalTime(tokens).Total() / float64(len(batchTokens))
	}
	return sum
}
