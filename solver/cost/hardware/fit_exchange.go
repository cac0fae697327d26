// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// exchanged is a measurement of bytes, or other work, with its time.
type exchanged struct{ work, us float64 }

func (e exchanged) microseconds() float64 { return e.us }

func (e exchanged) compare(f exchanged) int { return cmp.Compare(e.work, f.work) }

func (e *Exchange) of(measured exchanged) float64 { return e.Microseconds(measured.work) }

func allToAlls(c *Calibration) []exchanged {
	var list []exchanged
	for _, m := range c.AllToAll {
		list = append(list, exchanged{m.Bytes, m.Microseconds})
	}
	return list
}

func collectives(c *Calibration) (reduce, scatter, gather []exchanged) {
	for _, m := range c.Collectives {
		reduce, scatter, gather = append(reduce, exchanged{m.Bytes, m.AllReduce}), append(scatter, exchanged{m.Bytes, m.ReduceScatter}), append(gather, exchanged{m.Bytes, m.AllGather})
	}
	return reduce, scatter, gather
}

// fitGroups fits an exchange for each pair of group sizes, jointly for both directions.
func (p *Profile) fitGroups(c *Calibration) error {
	type sizes struct{ attention, experts int }
	var order []sizes
	points := map[sizes][]exchanged{}
	for _, m := range c.Bipartite {
		s := sizes{m.AttentionRanks, m.ExpertRanks}
		if points[s] == nil {
			order = append(order, s)
		}
		points[s] = append(points[s], exchanged{m.BusiestBytes(), m.Microseconds})
		if m.Back > 0 {
			points[s] = append(points[s], exchanged{m.BusiestBytes(), m.Back})
		}
	}
	for _, s := range order {
		exchange, err := fitExchange(points[s])
		if err != nil {
			return fmt.Errorf("send from %d to %d ranks: %w", s.attention, s.experts, err)
		}
		p.A2E = append(p.A2E, Bipartite{s.attention, s.experts, exchange})
	}
	return nil
}

func fitExchange(points []exchanged) (Exchange, error) {
	e, fit, err := fitted(points, oneLine, twoLines)
	if err != nil {
		return Exchange{}, err
	}
	e.Fit = fit
	return *e, nil
}

// oneLine fits an exchange with one start-up time and rate for all sizes.
func oneLine(points []exchanged) (*Exchange, bool) {
	l, ok := leastLine(points)
	return &Exchange{Line: l}, ok
}

// leastOfLine is the minimum number of measurements for each of two lines. Any two points fit a line exactly.
const leastOfLine = 3

// twoLines fits an exchange with a separate line for large sizes. It tries all splits of the measurements by size, fits
// a line to each part, and returns the pair whose minimum fits all measurements best.
func twoLines(points []exchanged) (*Exchange, bool) {
	sorted := slices.SortedStableFunc(slices.Values(points), exchanged.compare)
	var best *Exchange
	least := math.Inf(1)
	for cut := leastOfLine; cut+leastOfLine <= len(sorted); cut++ {
		small, ok := leastLine(sorted[:cut])
		large, also := leastLine(sorted[cut:])
		if !ok || !also || large.Start <= small.Start || large.PerMicrosecond <= small.PerMicrosecond {
			continue // one line is below the other everywhere, or small exchanges have the higher rate
		}
		e := &Exchange{Line: small, Large: &large}
		if sum := squares(points, e); sum < least {
			best, least = e, sum
		}
	}
	return best, best != nil
}

// leastRise is the minimum rise of a line over the measured work, as a fraction of the longest time. A smaller rise is
// rounding, and all times are equal.
const leastRise = 1e-9

// leastLine is a least-squares fit, weighted by the inverse square of the times. A negative start-up time is replaced
// by 0.
func leastLine(points []exchanged) (l Line, ok bool) {
	var one, work, us, works, both float64
	for _, p := range points {
		w := 1 / (p.us * p.us)
		one, work, us, works, both = one+w, work+w*p.work, us+w*p.us, works+w*p.work*p.work, both+w*p.work*p.us
	}
	spread := one*works - work*work
	if spread <= 1e-12*work*work {
		return l, false // all points have the same size, up to rounding
	}
	slope := (one*both - work*us) / spread
	shortest, longest := slices.MinFunc(points, exchanged.compare), slices.MaxFunc(points, exchanged.compare)
	slowest := slices.MaxFunc(points, func(a, b exchanged) int { return cmp.Compare(a.us, b.us) })
	if slope*(longest.work-shortest.work) <= leastRise*slowest.us {
		return l, false
	}
	l = Line{Start: (us - slope*work) / one, PerMicrosecond: 1 / slope}
	if l.Start < 0 {
		l = Line{PerMicrosecond: works / both}
	}
	return l, l.check() == nil
}
