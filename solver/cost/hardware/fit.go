package hardware

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// point is a measurement: some work, and its time.
type point struct{ work, us float64 }

const (
	// leastPoints are needed for a fit whose held-out error says anything.
	leastPoints = 5
	// folds is how many parts are held out, one after the other.
	folds = 5
)

// NewProfile fits every model to measurements.
func NewProfile(name string, memoryBytes float64, c *Calibration) (*Profile, error) {
	p := &Profile{Format: Format, Name: name, GPU: c.GPU, Ranks: c.World, MemoryBytes: memoryBytes, Products: c.Products}
	reduce, scatter, gather := make([]point, 0), make([]point, 0), make([]point, 0)
	for _, m := range c.Collectives {
		reduce, scatter, gather = append(reduce, point{m.Bytes, m.AllReduce}), append(scatter, point{m.Bytes, m.ReduceScatter}), append(gather, point{m.Bytes, m.AllGather})
	}
	for _, l := range []struct {
		name   string
		into   *Line
		points []point
	}{
		{"all_to_all", &p.AllToAll, exchanges(c)}, {"attention", &p.Attention, attention(c)},
		{"collectives: all_reduce_us", &p.AllReduce, reduce}, {"collectives: reduce_scatter_us", &p.ReduceScatter, scatter}, {"collectives: all_gather_us", &p.AllGather, gather},
	} {
		line, err := fitLine(l.points)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l.name, err)
		}
		*l.into = line
	}
	if err := p.fitGroups(c); err != nil {
		return nil, err
	}
	var err error
	if p.Grouped, err = fitGEMM(groupedKernels(c)); err != nil {
		return nil, fmt.Errorf("gate_up_gemm: grouped_us: %w", err)
	}
	if p.Dense, err = fitGEMM(denseKernels(c)); err != nil {
		return nil, fmt.Errorf("gate_up_gemm: dense_us: %w", err)
	}
	return p, p.Check()
}

// With is the profile with the exchange, and the grouped products where there are any, of machines of which no more was measured: what judges a
// plan is theirs then, and the rest stays.
func (p *Profile) With(c *Calibration) (*Profile, error) {
	with := *p
	with.Name = p.Name + " with measurements of " + cmp.Or(c.GPU, "other machines")
	if c.World > 0 {
		with.Ranks = c.World
	}
	var err error
	if with.AllToAll, err = fitLine(exchanges(c)); err != nil {
		return nil, fmt.Errorf("all_to_all: %w", err)
	}
	if len(c.Products) == 0 {
		return &with, nil
	}
	if with.Grouped, err = fitGEMM(groupedKernels(c)); err != nil {
		return nil, fmt.Errorf("gate_up_gemm: grouped_us: %w", err)
	}
	return &with, nil
}

func exchanges(c *Calibration) []point {
	var list []point
	for _, m := range c.AllToAll {
		list = append(list, point{m.Bytes, m.Microseconds})
	}
	return list
}

// AttentionFlops is the work of causal attention over a batch of sequences: scores and values, of which the upper half is left out.
func AttentionFlops(batch, heads, sequence, queryDim, valueDim float64) float64 {
	const multiplyAndAdd, causal = 2, 0.5
	return multiplyAndAdd * causal * batch * heads * sequence * sequence * (queryDim + valueDim)
}

func attention(c *Calibration) []point {
	var list []point
	for _, m := range c.Attention {
		list = append(list, point{AttentionFlops(m.Batch, m.Heads, m.Sequence, m.HeadDim, m.HeadDim), m.Microseconds})
	}
	return list
}

// fitGroups fits a line for each pair of sizes.
func (p *Profile) fitGroups(c *Calibration) error {
	type sizes struct{ attention, experts int }
	var order []sizes
	points := map[sizes][]point{}
	for _, m := range c.Bipartite {
		s := sizes{m.AttentionRanks, m.ExpertRanks}
		if points[s] == nil {
			order = append(order, s)
		}
		points[s] = append(points[s], point{m.BusiestBytes(), m.Microseconds})
	}
	for _, s := range order {
		line, err := fitLine(points[s])
		if err != nil {
			return fmt.Errorf("send from %d to %d ranks: %w", s.attention, s.experts, err)
		}
		p.A2E = append(p.A2E, Bipartite{s.attention, s.experts, line})
	}
	return nil
}

// fitLine fits the line of the least mean square of relative errors.
func fitLine(points []point) (Line, error) {
	if len(points) < leastPoints {
		return Line{}, fmt.Errorf("there are %d measurements; at least %d are needed", len(points), leastPoints)
	}
	l, ok := leastLine(points)
	if !ok {
		return l, fmt.Errorf("more work does not take longer: no rate can be told")
	}
	modelled := func(p point) float64 { return l.Microseconds(p.work) }
	l.Fit = fitOf(points, time, modelled, func(part []point) (func(point) float64, bool) {
		l, ok := leastLine(part)
		return func(p point) float64 { return l.Microseconds(p.work) }, ok
	}, func(a, b point) int { return cmp.Compare(a.work, b.work) })
	return l, nil
}

func time(p point) float64 { return p.us }

// leastLine is least squares, each point weighing by the inverse of its time's square. Where the start-up time came out negative it is 0.
func leastLine(points []point) (l Line, ok bool) {
	var one, work, us, works, both float64
	for _, p := range points {
		w := 1 / (p.us * p.us)
		one, work, us, works, both = one+w, work+w*p.work, us+w*p.us, works+w*p.work*p.work, both+w*p.work*p.us
	}
	slope := (one*both - work*us) / (one*works - work*work)
	l = Line{Start: (us - slope*work) / one, PerMicrosecond: 1 / slope}
	if l.Start < 0 {
		l = Line{PerMicrosecond: works / both}
	}
	return l, atLeastZero(l.Start) && above(l.PerMicrosecond)
}

// fitOf judges a model: on what it was fitted to, and on each fifth of the measurements, fitted to the others. The fifths are dealt by size,
// so that each has small and large ones.
func fitOf[P any](points []P, us, modelled func(P) float64, fit func([]P) (func(P) float64, bool), bySize func(a, b P) int) Fit {
	f := Fit{Points: len(points), Residuals: make([]float64, len(points))}
	mean := 0.0
	for _, p := range points {
		mean += us(p) / float64(len(points))
	}
	errors, unexplained, all := make([]float64, len(points)), 0.0, 0.0
	for i, p := range points {
		f.Residuals[i] = rounded(modelled(p)/us(p) - 1)
		errors[i] = math.Abs(f.Residuals[i])
		unexplained += (modelled(p) - us(p)) * (modelled(p) - us(p))
		all += (us(p) - mean) * (us(p) - mean)
	}
	f.MedianError, f.MaxError = rounded(median(errors)), rounded(slices.Max(errors))
	if all > 0 {
		f.R2 = rounded(1 - unexplained/all)
	}
	dealt := slices.Clone(points)
	slices.SortStableFunc(dealt, bySize)
	errors = errors[:0]
	for fold := range folds {
		var seen, held []P
		for i, p := range dealt {
			if i%folds == fold {
				held = append(held, p)
			} else {
				seen = append(seen, p)
			}
		}
		model, ok := fit(seen)
		for _, p := range held {
			e := 1.0 // without a model nothing is known of the time
			if ok {
				e = math.Abs(model(p)/us(p) - 1)
			}
			errors = append(errors, e)
		}
	}
	f.HeldOutMedianError, f.HeldOutMaxError = rounded(median(errors)), rounded(slices.Max(errors))
	return f
}

func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// kernels are that many products one after the other, each of weights with rows.
type kernels struct{ count, weights, rows, us float64 }

func groupedKernels(c *Calibration) []kernels {
	var list []kernels
	for _, m := range c.Products {
		list = append(list, kernels{1, m.Experts * m.Hidden * 2 * m.Inter, m.TokensPerExpert, m.Microseconds})
	}
	return list
}

func denseKernels(c *Calibration) []kernels {
	var list []kernels
	for _, m := range c.Products {
		if m.Dense > 0 {
			list = append(list, kernels{m.Experts, m.Hidden * 2 * m.Inter, m.TokensPerExpert, m.Dense})
		}
	}
	return list
}

func fitGEMM(points []kernels) (GEMM, error) {
	if len(points) < leastPoints {
		return GEMM{}, fmt.Errorf("there are %d measurements; at least %d are needed", len(points), leastPoints)
	}
	modelOf := func(g GEMM) func(kernels) float64 {
		return func(k kernels) float64 { return k.count * g.Microseconds(k.weights, k.rows) }
	}
	g := leastGEMM(points)
	g.Fit = fitOf(points, func(k kernels) float64 { return k.us }, modelOf(g), func(part []kernels) (func(kernels) float64, bool) { return modelOf(leastGEMM(part)), true },
		func(a, b kernels) int {
			return cmp.Or(cmp.Compare(a.rows, b.rows), cmp.Compare(a.weights*a.count, b.weights*b.count))
		})
	return g, nil
}

// The rates that the search for a kernel's begins with; any would do that are within some factors of ten of what is found.
const usualBytesPerMicrosecond, usualFlopsPerMicrosecond = 3.09e6, 660e6

// leastGEMM is of the least mean square of relative errors, by pattern search over the logarithms of its numbers: four numbers and a
// surface without rough places need no more.
func leastGEMM(points []kernels) GEMM {
	model := func(logs [4]float64) GEMM {
		return GEMM{Floor: math.Exp(logs[0]), Start: math.Exp(logs[1]), BytesPerMicrosecond: math.Exp(logs[2]), FlopsPerMicrosecond: math.Exp(logs[3])}
	}
	errorOf := func(logs [4]float64) float64 {
		g, sum := model(logs), 0.0
		for _, k := range points {
			e := k.count*g.Microseconds(k.weights, k.rows)/k.us - 1
			sum += e * e
		}
		return sum
	}
	shortest := math.Inf(1)
	for _, k := range points {
		shortest = min(shortest, k.us/k.count)
	}
	at := [4]float64{math.Log(shortest), math.Log(shortest / 2), math.Log(usualBytesPerMicrosecond), math.Log(usualFlopsPerMicrosecond)}
	least := errorOf(at)
	for step := 1.0; step > 1e-4; {
		improved := false
		for i := range at {
			for _, by := range []float64{step, -step} {
				next := at
				next[i] += by
				if e := errorOf(next); e < least {
					at, least, improved = next, e, true
				}
			}
		}
		if !improved {
			step /= 2
		}
	}
	return model(at)
}
