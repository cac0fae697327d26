package eps

import (
	"fmt"
	"math"
)

// Contention is by how much kernels slow each other down while they overlap, as measured on GPUs that exchange with their own
// multiprocessors: 0.5 is half as long again.
type Contention struct {
	// Experts is of products beside an exchange, Exchange of an exchange beside products, Link of two exchanges at once.
	Experts, Exchange, Link float64
}

// H200 is what H200 that exchange over NVLink were measured to have: FitContention of the layers in testdata/pipelined-moe-h200x2.json of package
// pipeline.
var H200 = Contention{Experts: 0.231, Exchange: 0.797, Link: 0.551}

// Piece is what the stages of one of N equal pieces of a layer take by themselves.
type Piece struct{ Dispatch, Experts, Combine float64 }

// Cut is a layer in pieces.
type Cut struct {
	Pieces int
	Piece  Piece
	// OneLink says that exchanges take turns, in the order D1 D2 C1 D3 C2 …; else dispatches and combines have a stream each.
	OneLink bool
}

// Measured is what a layer was measured to take.
type Measured struct {
	Cut  Cut
	Time float64
}

// task is a stage of a piece. Those of a stream are done in order.
type task struct {
	stage, piece int
	left         float64
}

const (
	dispatching = iota
	computing
	combining
)

// streams are the tasks of a layer in the order in which each stream has them; the last stream computes.
func (c Cut) streams() [][]task {
	var exchanges, dispatches, combines, products []task
	for piece := range c.Pieces {
		d, x, m := task{dispatching, piece, c.Piece.Dispatch}, task{computing, piece, c.Piece.Experts}, task{combining, piece, c.Piece.Combine}
		dispatches, products, combines = append(dispatches, d), append(products, x), append(combines, m)
		exchanges = append(exchanges, d)
		if piece > 0 {
			exchanges = append(exchanges, combines[piece-1])
		}
	}
	if c.OneLink {
		return [][]task{append(exchanges, combines[c.Pieces-1]), products}
	}
	return [][]task{dispatches, combines, products}
}

// Time is that of a layer. What overlaps goes on at the lower rates until one of it ends.
func (c Contention) Time(cut Cut) float64 {
	streams := cut.streams()
	finished := make([][combining + 1]bool, cut.Pieces)
	for now := 0.0; ; {
		var running []*task
		exchanging, working := 0, false
		for s := range streams {
			if len(streams[s]) == 0 {
				continue
			}
			if next := &streams[s][0]; next.stage == dispatching || finished[next.piece][next.stage-1] {
				running = append(running, next)
				working = working || next.stage == computing
				if next.stage != computing {
					exchanging++
				}
			}
		}
		if len(running) == 0 {
			return now
		}
		step, slowness := math.Inf(1), make([]float64, len(running))
		for i, t := range running {
			slowness[i] = c.slowness(t.stage == computing, exchanging, working)
			step = min(step, t.left*slowness[i])
		}
		now += step
		for i, t := range running {
			if rest := t.left - step/slowness[i]; rest > 1e-9*t.left {
				t.left = rest
			} else {
				finished[t.piece][t.stage] = true
			}
		}
		for s := range streams {
			if len(streams[s]) > 0 && finished[streams[s][0].piece][streams[s][0].stage] {
				streams[s] = streams[s][1:]
			}
		}
	}
}

// slowness is how much longer a kernel takes while so many exchanges, and products or none, are under way with it.
func (c Contention) slowness(product bool, exchanging int, working bool) float64 {
	s := 1.0
	switch {
	case product && exchanging > 0:
		s += c.Experts
	case !product && working:
		s += c.Exchange
	}
	if !product && exchanging > 1 {
		s *= 1 + c.Link
	}
	return s
}

// Margin is by how much a cut must be faster than the uncut layer, by the model, to be chosen: the model's own error, in the median.
const Margin = 0.05

// Choose is the number of pieces of the fastest of several cuts of one layer; of equal ones the fewest. One of them must be uncut, and is
// chosen where no other is faster by the margin.
func (c Contention) Choose(cuts []Cut) (int, error) {
	var uncut, least float64
	best := 0
	for _, cut := range cuts {
		time := c.Time(cut)
		if cut.Pieces == 1 {
			uncut = time
		}
		if best == 0 || time < least || time == least && cut.Pieces < best {
			best, least = cut.Pieces, time
		}
	}
	switch {
	case uncut == 0:
		return 0, fmt.Errorf("the layer in one piece is not among the %d cuts", len(cuts))
	case uncut < (1+Margin)*least:
		return 1, nil
	}
	return best, nil
}

// FitContention finds the contention that explains measured layers best: of the least mean square of relative errors' logarithms, by
// descent along each number in turn, in steps that become smaller.
func FitContention(measured []Measured) (Contention, error) {
	cut := 0
	for i, m := range measured {
		if m.Cut.Pieces < 1 || !(m.Time > 0) || !(m.Cut.Piece.Dispatch > 0) || !(m.Cut.Piece.Experts > 0) || !(m.Cut.Piece.Combine > 0) {
			return Contention{}, fmt.Errorf("layer %d is %+v; all must be above 0", i, m)
		}
		if m.Cut.Pieces > 1 {
			cut++
		}
	}
	if cut < 6 {
		return Contention{}, fmt.Errorf("there are %d layers in more than one piece; at least 6 are needed", cut)
	}
	loss := func(values [3]float64) float64 {
		sum, c := 0.0, Contention{values[0], values[1], values[2]}
		for _, m := range measured {
			e := math.Log(c.Time(m.Cut) / m.Time)
			sum += e * e
		}
		return sum
	}
	values := [3]float64{0.2, 0.5, 0.5}
	least := loss(values)
	for step := 0.25; step > 0.002; {
		improved := false
		for i := range values {
			for _, change := range []float64{step, -step} {
				next := values
				next[i] = max(0, next[i]+change)
				if l := loss(next); l < least {
					values, least, improved = next, l, true
				}
			}
		}
		if !improved {
			step /= 2
		}
	}
	return Contention{values[0], values[1], values[2]}, nil
}
