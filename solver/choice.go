package solver

import (
	"fmt"

	"github.com/semmoe/operator/solver/cost"
)

// Tier is how a new plan reaches what serves, the cheapest first.
type Tier string

// The tiers.
const (
	// NoTier keeps the plan in service.
	NoTier Tier = "none"
	// TablesTier gives routers new tables for the placement in service: no pod is restarted.
	TablesTier Tier = "tables"
	// LayoutTier rolls a new placement out.
	LayoutTier Tier = "layout"
)

// Verdict says in a word why a tier was chosen.
type Verdict string

// The verdicts.
const (
	Gain           Verdict = "Gain"
	NoGainExpected Verdict = "NoGainExpected"
	// LocalityDoesNotPay says that latency dominates: not even a plan that makes every activation local would gain enough.
	LocalityDoesNotPay Verdict = "LocalityDoesNotPay"
)

// Choice says what a new plan must gain.
type Choice struct {
	// BatchTokens are the sizes of the batches that are served, in tokens over all ranks; plans are judged by the mean time over
	// these.
	BatchTokens []int
	// MinimumGainPercent is by how much the modelled time of a MoE layer must be below that of the plan in service.
	MinimumGainPercent float64
	// TargetLAR is the rate at which new tables are good enough, whatever a new placement would gain; 0 is none.
	TargetLAR float64
}

const (
	// DefaultMinimumGainPercent is the percentage of a layer's modelled time that a plan must save where none is given: the default of the API.
	DefaultMinimumGainPercent = 2
	// tablesSuffice is the part of a new placement's gain in time that tables alone must reach to be preferred.
	tablesSuffice = 0.95
)

// Check refuses what cannot be chosen by.
func (c *Choice) Check() error {
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

// Score is what a plan is worth on held-out requests. LAR is the local activation rate; the times are those of a MoE layer, as
// modelled; the imbalances are max/mean, of tokens as the attention mode counts them and of what experts compute.
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
	s.LAR = min(1, s.LAR+weight*r.LAR) // but for rounding
	s.Exchange += weight * t.Exchange
	s.Compute += weight * t.Compute
	s.TokenImbalance += weight * balance
	s.ExpertImbalance += weight * r.ExpertWindowImbalance
}

// Decision is which tier was chosen, and why.
type Decision struct {
	Tier    Tier    `json:"tier"`
	Verdict Verdict `json:"verdict"`
	// Reason is one sentence for people.
	Reason string `json:"reason"`
	// TablesGainPercent and LayoutGainPercent are by how much the modelled times are below that of the plan in service,
	// MostGainPercent what they were if every activation were local.
	TablesGainPercent float64 `json:"tables_gain_percent"`
	LayoutGainPercent float64 `json:"layout_gain_percent"`
	MostGainPercent   float64 `json:"most_gain_percent"`
	// SavedPercent is by how much the chosen plan lowers the modelled time, Low and High are the ends of its 95% interval; nil where nothing is chosen, or
	// where the spread over documents is not known.
	SavedPercent *float64 `json:"saved_percent,omitempty"`
	Low          *float64 `json:"saved_percent_low,omitempty"`
	High         *float64 `json:"saved_percent_high,omitempty"`
}

// confirm holds a gain against its interval, and takes the choice back where it is not proven.
func (d *Decision) confirm(w *Worth) {
	d.SavedPercent, d.Low, d.High = &w.SavedPercent, &w.Low, &w.High
	if w.Verdict != Gain {
		d.Tier, d.Verdict, d.Reason = NoTier, w.Verdict, w.Reason
	}
}

// Choose picks the cheapest tier that gains enough, given the scores of the plan in service, of new tables and of a new placement,
// and the time in microseconds of a layer whose activations are all local.
func (c *Choice) Choose(current, tables, layout Score, local float64) Decision {
	gain := func(us float64) float64 { return 100 * (1 - us/current.Total()) }
	d := Decision{
		Tier: NoTier, Verdict: NoGainExpected,
		TablesGainPercent: gain(tables.Total()), LayoutGainPercent: gain(layout.Total()), MostGainPercent: gain(local),
	}
	least := c.MinimumGainPercent
	judge := func(saved float64) (Verdict, string) {
		return (&Finding{Saved: saved, Low: saved, Most: d.MostGainPercent}).Judge(least)
	}
	ofTables, _ := judge(d.TablesGainPercent)
	ofLayout, reason := judge(d.LayoutGainPercent)
	tablesPay, layoutPays := ofTables == Gain, ofLayout == Gain
	switch {
	case ofLayout == LocalityDoesNotPay:
		d.Verdict, d.Reason = ofLayout, reason
	case tablesPay && c.TargetLAR > 0 && tables.LAR >= c.TargetLAR:
		d.take(TablesTier, "new tables alone restore the local activation rate: %.3f, wanted are %.3f; a layer's modelled time is %.1f%% less", tables.LAR, c.TargetLAR, d.TablesGainPercent)
	case tablesPay && d.TablesGainPercent >= tablesSuffice*d.LayoutGainPercent:
		d.take(TablesTier, "new tables alone make a layer's modelled time %.1f%% less, a new placement would make it %.1f%% less", d.TablesGainPercent, d.LayoutGainPercent)
	case layoutPays:
		d.take(LayoutTier, "a new placement makes a layer's modelled time %.1f%% less, new tables alone %.1f%%", d.LayoutGainPercent, d.TablesGainPercent)
	default:
		d.Reason = fmt.Sprintf("a new placement makes a layer's modelled time %.1f%% less, new tables alone %.1f%%; wanted are %g%%", d.LayoutGainPercent, d.TablesGainPercent, least)
	}
	return d
}

func (d *Decision) take(t Tier, format string, args ...any) {
	d.Tier, d.Verdict, d.Reason = t, Gain, fmt.Sprintf(format, args...)
}

// localTime is the mean time over batch sizes if every activation were local.
func localTime(l cost.Layer, batchTokens []int) float64 {
	sum := 0.0
	for _, tokens := range batchTokens {
		sum += l.LocalTime(tokens).Total() / float64(len(batchTokens))
	}
	return sum
}
