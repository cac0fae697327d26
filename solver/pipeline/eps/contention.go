// SPDX-License-Identifier: Apache-2.0

package eps

import (
	"fmt"
	"math"
)

// Contention is the relative slowdown of overlapping kernels, as measured on GPUs with exchanges on their own
// multiprocessors: 0.5 means 1.5 times the duration.
type Contention struct {
	// Experts is the slowdown of products during an exchange, Exchange the slowdown of an exchange during products,
	// Link the slowdown of two concurrent exchanges.
	Experts, Exchange, Link float64
}

// H200 is the contention of H200 GPUs that exchange over NVLink, fitted to the layers in
// testdata/pipelined-moe-h200x2.json of package pipeline (see TestBuiltInContention).
var H200 = Contention{Experts: 0.231, Exchange: 0.797, Link: 0.551}

// Piece contains the durations of the stages of one of N equal pieces of a layer, without overlap.
type Piece struct{ Dispatch, Experts, Combine float64 }

// Cut is a layer divided into pieces.
type Cut struct {
	Pieces int
	Piece  Piece
	// OneLink means that exchanges are sequential, in the order D1 D2 C1 D3 C2 …. Without it, dispatches and combines
	// have separate streams.
	OneLink bool
}

// task is a stage of a piece. The tasks of a stream run in order.
type task struct {
	stage, piece int
	left         float64
}

const (
	dispatching = iota
	computing
	combining
)

// streams returns the tasks of a layer by stream, in order; the last stream computes.
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

// Time returns the duration of a layer. Overlapping tasks run at reduced rates until one of them ends.
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

// slowness returns the relative duration of a kernel while the given number of exchanges, and products if working is
// set, are running.
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

// margin is the minimum relative improvement of a cut over the uncut layer in the model: the model's median error.
const margin = 0.05

// Choose returns the number of pieces of the fastest of several cuts of one layer; ties go to the lower number. One of
// the cuts must be uncut. It is chosen if no other cut is faster by margin.
func (c Contention) Choose(cuts []Cut) (int, error) {
	var uncut, shortest float64
	best := 0
	for _, cut := range cuts {
		time := c.Time(cut)
		if cut.Pieces == 1 {
			uncut = time
		}
		if best == 0 || time < shortest || time == shortest && cut.Pieces < best {
			best, shortest = cut.Pieces, time
		}
	}
	switch {
	case uncut == 0:
		return 0, fmt.Errorf("the %d cuts do not include the layer in one piece", len(cuts))
	case uncut < (1+margin)*shortest:
		return 1, nil
	}
	return best, nil
}
