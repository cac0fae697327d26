// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
)

const (
	// leastPoints is the minimum number of measurements for a meaningful held-out error.
	leastPoints = 5
	// folds is the number of parts in cross-validation.
	folds = 5
)

// NewProfile fits every model to measurements.
func NewProfile(name string, memoryBytes float64, c *Calibration) (*Profile, error) {
	p := &Profile{Format: format, Name: name, GPU: c.GPU, Ranks: c.World, MemoryBytes: memoryBytes}
	reduce, scatter, gather := collectives(c)
	for _, of := range []struct {
		name   string
		into   *Exchange
		points []exchanged
	}{
		{"all_to_all", &p.AllToAll, allToAlls(c)}, {"collectives: all_reduce_us", &p.AllReduce, reduce}, {"collectives: reduce_scatter_us", &p.ReduceScatter, scatter},
		{"collectives: all_gather_us", &p.AllGather, gather},
	} {
		var err error
		if *of.into, err = fitExchange(of.points); err != nil {
			return nil, fmt.Errorf("%s: %w", of.name, err)
		}
	}
	var err error
	if p.Attention, err = fitAttention(attentions(c)); err != nil {
		return nil, fmt.Errorf("attention: %w", err)
	}
	if err := p.fitGroups(c); err != nil {
		return nil, err
	}
	if len(c.Products) == 0 {
		return nil, errors.New("gate_up_gemm: nothing was measured: the grouped product needs a GPU of the Hopper generation, or PyTorch 2.9 or later")
	}
	if p.Grouped, err = fitGEMM(groupedKernels(c)); err != nil {
		return nil, fmt.Errorf("gate_up_gemm: grouped_us: %w", err)
	}
	if p.Dense, err = fitGEMM(denseKernels(c)); err != nil {
		return nil, fmt.Errorf("gate_up_gemm: dense_us: %w", err)
	}
	p.Products = bothMeasured(c)
	return p, p.Check()
}

// With returns the profile with the exchange, and the grouped GEMMs if measured, of other machines, for which only
// these are measured. The other models stay.
func (p *Profile) With(c *Calibration) (*Profile, error) {
	with := *p
	with.Name = p.Name + " with measurements of " + cmp.Or(c.GPU, "other machines")
	if c.World > 0 {
		with.Ranks = c.World
	}
	var err error
	if with.AllToAll, err = fitExchange(allToAlls(c)); err != nil {
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

// measurement is a measured time. compare orders measurements by size.
type measurement[P any] interface {
	microseconds() float64
	compare(other P) int
}

// timed is a time model of measurements.
type timed[P any] interface{ of(P) float64 }

// fitter fits a model to measurements by least squares of relative errors. It returns false if there is no such model.
type fitter[P, M any] func([]P) (M, bool)

// tooFew returns an error for fewer measurements than a fit requires.
func tooFew[P any](points []P) error {
	if len(points) < leastPoints {
		return fmt.Errorf("there are %d measurements; at least %d are needed", len(points), leastPoints)
	}
	return nil
}

const (
	// worth is the maximum ratio of mean square held-out errors for choosing a model with more parameters. With few or
	// noisy measurements, the error also decreases by chance.
	worth = 0.5
	// enough is a mean square error that needs no improvement: repeated measurements differ by 1%.
	enough = 0.01 * 0.01
)

// fitted returns the model and its fit. It chooses the richer model if that improves the error on held-out measurements
// enough.
func fitted[P measurement[P], M timed[P]](points []P, simple, richer fitter[P, M]) (model M, fit Fit, err error) {
	if err := tooFew(points); err != nil {
		return model, fit, err
	}
	best, held := simple, heldOut(points, simple)
	if square := meanSquare(held); square > enough {
		if more := heldOut(points, richer); meanSquare(more) <= worth*square {
			best, held = richer, more
		}
	}
	model, ok := best(points)
	if !ok {
		return model, fit, fmt.Errorf("the time does not grow with work; no rate can be fitted")
	}
	return model, fitOf(points, model, held), nil
}

// fitOf returns the fit of a model: on the measurements it was fitted to, and by its held-out errors.
func fitOf[P measurement[P], M timed[P]](points []P, model M, held []float64) Fit {
	f := Fit{Points: len(points), Residuals: make([]float64, len(points))}
	mean := 0.0
	for _, p := range points {
		mean += p.microseconds() / float64(len(points))
	}
	errors, unexplained, all := make([]float64, len(points)), 0.0, 0.0
	for i, p := range points {
		us, modelled := p.microseconds(), model.of(p)
		f.Residuals[i] = rounded(modelled/us - 1)
		errors[i] = math.Abs(f.Residuals[i])
		unexplained += (modelled - us) * (modelled - us)
		all += (us - mean) * (us - mean)
	}
	f.MedianError, f.MaxError = rounded(median(errors)), rounded(slices.Max(errors))
	if all > 0 {
		f.R2 = rounded(1 - unexplained/all)
	}
	f.HeldOutMedianError, f.HeldOutMaxError = rounded(median(held)), rounded(slices.Max(held))
	return f
}

// heldOut returns the absolute relative errors on each fifth of the measurements, with the model fitted to the others.
// The fifths are assigned round-robin by size, so that each has small and large measurements.
func heldOut[P measurement[P], M timed[P]](points []P, fit fitter[P, M]) []float64 {
	sorted := slices.Clone(points)
	slices.SortStableFunc(sorted, func(a, b P) int { return a.compare(b) })
	var errors []float64
	for fold := range folds {
		var seen, held []P
		for i, p := range sorted {
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
				e = math.Abs(model.of(p)/p.microseconds() - 1)
			}
			errors = append(errors, e)
		}
	}
	return errors
}

func meanSquare(errors []float64) float64 {
	sum := 0.0
	for _, e := range errors {
		sum += e * e / float64(len(errors))
	}
	return sum
}

// squares returns the sum of the squares of a model's relative errors.
func squares[P measurement[P], M timed[P]](points []P, model M) float64 {
	sum := 0.0
	for _, p := range points {
		e := model.of(p)/p.microseconds() - 1
		sum += e * e
	}
	return sum
}

func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
