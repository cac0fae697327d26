// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"context"
	"math/rand/v2"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// lookAheadRate is the first step size of a weight.
	lookAheadRate = 0.1
	// minGradient is the minimum error of a probability that is learnt from: most experts are far from being activated,
	// and predicted so.
	minGradient = 2e-3
	// maxLookAheadWork is the maximum number of samples of a layer times the experts; above it, training uses a sample
	// of the requests.
	maxLookAheadWork = 1 << 24
	// cancelEvery is the number of samples between two checks for cancellation.
	cancelEvery = 1 << 12
)

// TrainLookAhead fits the corrections of a look-ahead to the listed requests of a trace with a look-ahead. It
// minimises the log loss of each expert's probability by stochastic gradient descent with a step size per weight
// (AdaGrad).
func TrainLookAhead(ctx context.Context, t *trace.Trace, requests []int, seed uint64, progress func(done, total int)) (*LookAhead, error) {
	m := RawLookAhead(&t.Model)
	if err := m.Fits(t); err != nil {
		return nil, err
	}
	n := m.Experts
	m.Width = min(t.LookAhead.Width, trace.LookAheadWidth(m.TopK, n))
	m.Bias, m.Gate, m.Earlier = make([]float32, m.Layers*n), make([]float32, m.Layers*n*n), make([]float32, m.Layers*n*n)
	var positions []int32
	for _, r := range trace.Sample(t, requests, min(maxSamples, maxLookAheadWork/n), seed) {
		for p := t.Offsets[r]; p < t.Offsets[r+1]; p++ {
			positions = append(positions, int32(p))
		}
	}
	done := affinity.Counter(m.Layers, progress)
	err := affinity.Parallel(ctx, m.Layers, func(l int) {
		newLookAheadTrainer(m, t, l).train(ctx, positions, seed)
		done()
	})
	return m, err
}

// lookAheadTrainer fits one layer.
type lookAheadTrainer struct {
	model *LookAhead
	trace *trace.Trace
	layer int
	w     lookAheadWeights
	// squares are the sums of squared gradients of each weight.
	squares lookAheadWeights
	inputs
	chance []float32
	rate   float32
}

func newLookAheadTrainer(m *LookAhead, t *trace.Trace, layer int) *lookAheadTrainer {
	n := m.Experts
	return &lookAheadTrainer{
		model: m, trace: t, layer: layer, w: m.layer(layer), inputs: newInputs(n), chance: make([]float32, n),
		squares: lookAheadWeights{new(float32), make([]float32, n), make([]float32, n*n), make([]float32, n*n)},
	}
}

func (r *lookAheadTrainer) train(ctx context.Context, positions []int32, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 0x6c6f6f6b61686561^uint64(r.layer)))
	total := float32(passes * len(positions))
	order := append([]int32(nil), positions...)
	for pass := range passes {
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for i, position := range order {
			if i%cancelEvery == 0 && ctx.Err() != nil {
				return
			}
			r.rate = lookAheadRate * (1 - float32(pass*len(order)+i)/total)
			r.learn(int(position))
		}
	}
}

// learn takes one gradient step on the loss of one sample.
func (r *lookAheadTrainer) learn(position int) {
	r.observe(r.model, observation(r.trace, r.layer, position))
	r.w.chances(r.chance, &r.inputs)
	for _, expert := range r.trace.Row(position, r.layer) {
		r.chance[expert]--
	}
	n := len(r.chance)
	slope := float32(0)
	for expert, g := range r.chance {
		slope += g * r.margin[expert]
		if g < minGradient && g > -minGradient {
			continue
		}
		r.step(&r.w.bias[expert], &r.squares.bias[expert], g)
		for i, from := range r.probable {
			at := int(from)*n + expert
			r.step(&r.w.gate[at], &r.squares.gate[at], g*r.value[i])
		}
		for _, from := range r.earlier {
			at := int(from)*n + expert
			r.step(&r.w.earlier[at], &r.squares.earlier[at], g)
		}
	}
	r.step(r.w.slope, r.squares.slope, slope)
}

func (r *lookAheadTrainer) step(weight, squares *float32, gradient float32) {
	*squares += gradient * gradient
	*weight -= r.rate * gradient * rsqrt(*squares)
}
