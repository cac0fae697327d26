// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Copies records how the number of redundant slots was chosen from memory.
type Copies struct {
	// MemoryBytes is the memory of a rank available for copies. ExpertBytes is the size of one expert in one layer.
	// Layers is the number of MoE layers.
	MemoryBytes int64 `json:"memory_bytes"`
	ExpertBytes int64 `json:"expert_bytes"`
	Layers      int   `json:"layers"`
	// MaxSlots is the maximum number of redundant slots per rank that fits into the memory. Chosen is the number in the
	// plan.
	MaxSlots int `json:"max_redundant_slots"`
	Chosen   int `json:"redundant_slots"`
	// Points are the compared numbers of slots, ascending.
	Points []CopyPoint `json:"points"`
}

// CopyPoint is a number of redundant slots per rank with its scores on held-out documents of the train requests: means
// over splits and batch sizes.
type CopyPoint struct {
	RedundantSlots int `json:"redundant_slots"`
	// MemoryBytes is the memory of a rank that the copies occupy.
	MemoryBytes int64 `json:"memory_bytes"`
	// LayerUS is the modelled time of a layer in microseconds, LAR the local activation rate, ExpertImbalance the
	// imbalance of windows or batches.
	LayerUS         float64 `json:"layer_us"`
	LAR             float64 `json:"lar"`
	ExpertImbalance float64 `json:"expert_imbalance"`
}

// MaxMapSlots bounds the slots of all layers of a model, including dense layers: readers of plans reject larger plans.
const MaxMapSlots = 1 << 22

// minSlots returns the minimum number of redundant slots, to validate options that depend on copies.
func (o *Options) minSlots() int {
	if o.RedundantMemory > 0 {
		return 1
	}
	return o.RedundantSlots
}

// checkCopies validates the memory for copies.
func (o *Options) checkCopies(m *trace.Model) error {
	switch {
	case o.RedundantMemory < 0:
		return fmt.Errorf("memory for copies of experts: %d bytes is invalid: it must not be negative", o.RedundantMemory)
	case o.RedundantMemory == 0:
		return nil
	case o.RedundantSlots != 0:
		return fmt.Errorf("%d redundant slots per rank and memory for copies of experts are mutually exclusive", o.RedundantSlots)
	case o.Algorithm != placement.Auto || o.objective() != placement.Time:
		return fmt.Errorf("memory for copies of experts requires objective %s and algorithm %s, not %s and %s", placement.Time, placement.Auto, o.objective(), o.Algorithm)
	}
	_, err := o.copySizing(m)
	return err
}

// copySizing returns the number of copies that fit into the memory.
func (o *Options) copySizing(m *trace.Model) (*Copies, error) {
	expert, err := cost.ExpertBytes(m)
	if err != nil {
		return nil, fmt.Errorf("failed to choose the number of copies from memory: %w", err)
	}
	c := &Copies{MemoryBytes: o.RedundantMemory, ExpertBytes: expert, Layers: len(m.Layers)}
	perRank := m.Experts / o.Ranks
	inMaps := MaxMapSlots/(max(m.HiddenLayers, len(m.Layers))*o.Ranks) - perRank
	c.MaxSlots = int(min(c.MemoryBytes/c.bytesOf(1), int64(m.Experts-perRank), int64(max(inMaps, 0))))
	return c, nil
}

// bytesOf returns the memory that a number of redundant slots occupies on a rank.
func (c *Copies) bytesOf(slots int) int64 { return int64(slots) * int64(c.Layers) * c.ExpertBytes }

// numbers returns the numbers of redundant slots to compare: 0, 1, 2, 4, ... and the maximum.
func (c *Copies) numbers() []int {
	numbers := []int{0}
	for n := 1; n < c.MaxSlots; n *= 2 {
		numbers = append(numbers, n)
	}
	if c.MaxSlots > 0 {
		numbers = append(numbers, c.MaxSlots)
	}
	return numbers
}

// Text returns one sentence with the chosen number of copies and the reason.
func (c *Copies) Text() string {
	if c.MaxSlots == 0 {
		return fmt.Sprintf("no copies: %s per rank are too small for one expert in each of the %d layers, %s", BytesText(c.MemoryBytes), c.Layers, BytesText(c.bytesOf(1)))
	}
	var none, chosen *CopyPoint
	for i := range c.Points {
		if c.Points[i].RedundantSlots == 0 {
			none = &c.Points[i]
		}
		if c.Points[i].RedundantSlots == c.Chosen {
			chosen = &c.Points[i]
		}
	}
	switch {
	case none == nil || chosen == nil:
		return "no copies: the train requests or the time budget do not suffice to compare numbers of copies"
	case c.Chosen == 0:
		return fmt.Sprintf("no copies: up to %d per rank and layer save too little of a layer's modelled time", c.Points[len(c.Points)-1].RedundantSlots)
	}
	return fmt.Sprintf("%d of at most %d copies per rank and layer, %s per rank: a layer's modelled time falls by %.1f%% against none",
		c.Chosen, c.MaxSlots, BytesText(chosen.MemoryBytes), 100*(1-chosen.LayerUS/none.LayerUS))
}

// BytesText formats a number of bytes in GiB or MiB.
func BytesText(bytes int64) string {
	if bytes >= 1<<30 {
		return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
	}
	return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
}

// copies sets the number of redundant slots and the copy rule. Without copies there is no copy rule.
func (o *Options) copies(slots int, rule placement.CopyRule) {
	o.RedundantSlots, o.CopyRule = slots, rule
	if slots == 0 && o.RedundantMemory > 0 {
		o.CopyRule = placement.NearestCopy
	}
}

// runSized chooses the number of redundant slots, and solves with it. Numbers of slots, and the candidates of each
// number, are compared on held-out documents of the train requests. A larger number is
// chosen only if it is faster than the smaller ones by more than chance.
func (s *search) runSized(ctx context.Context, deadline time.Time) (*Solution, error) {
	sizing, err := s.options.copySizing(&s.trace.Model)
	if err != nil {
		return nil, err
	}
	numbers := sizing.numbers()
	slices.Reverse(numbers[1:]) // the maximum pays most often, so an exhausted time budget skips small numbers
	trials, truncated, err := s.scoreCandidates(ctx, numbers, halfway(deadline))
	if err != nil {
		return nil, err
	}
	slices.SortFunc(trials, func(a, b trial) int { return a.slots - b.slots })
	name := string(placement.ContiguousAlgorithm) // one document is no evidence
	if truncated {
		name = placement.PointOfTime
	}
	if best := sizing.compare(trials); best != nil {
		name, sizing.Chosen = best.fastest(), best.slots
	}
	s.options.copies(sizing.Chosen, s.options.CopyRule)
	solution, err := s.runNamed(ctx, name, truncated, deadline)
	if err != nil {
		return nil, err
	}
	solution.Plan.Copies = sizing
	return solution, nil
}

// compare records the numbers of redundant slots, and returns the trial to choose, or nil if there is none. The first
// trial has no copies.
func (c *Copies) compare(trials []trial) (best *trial) {
	for i := range trials {
		t := &trials[i]
		c.Points = append(c.Points, c.point(t))
		if best == nil {
			best = t
			continue
		}
		plain := trials[0].times(trials[0].names[0])
		if lead, noise := marginOf(t.times(t.fastest()), best.times(best.fastest()), plain); lead > noise {
			best = t
		}
	}
	return best
}

// point returns the mean of a number's fastest candidate over splits.
func (c *Copies) point(t *trial) CopyPoint {
	p := CopyPoint{RedundantSlots: t.slots, MemoryBytes: c.bytesOf(t.slots)}
	splits := t.figures[t.fastest()]
	for i := range splits {
		p.LayerUS += splits[i].mean / float64(len(splits))
		p.LAR += splits[i].lar / float64(len(splits))
		p.ExpertImbalance += splits[i].imbalance / float64(len(splits))
	}
	round := func(v, places float64) float64 { return math.Round(v*places) / places }
	p.LayerUS, p.LAR, p.ExpertImbalance = round(p.LayerUS, 100), round(p.LAR, 1e4), round(p.ExpertImbalance, 1e4)
	return p
}
