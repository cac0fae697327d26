// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline/eps"
)

// MicroBatches models the split of a step's tokens into micro-batches, as engines do: each micro-batch passes all experts
// of a rank, so that each reads all weights. The exchange of a micro-batch overlaps the products of another one.
type MicroBatches struct {
	schedule *Schedule
	profile  *hardware.Profile
	slots    int
}

// MicroBatches returns the model for ranks with a number of slots, at the local activation rate lar.
func (s *Schedule) MicroBatches(p *hardware.Profile, slotsPerRank int, lar float64) (*MicroBatches, error) {
	if slotsPerRank < 1 || !(lar >= 0) || lar > 1 {
		return nil, fmt.Errorf("%d slots per rank and a local activation rate of %v; allowed are at least 1, and 0 to 1", slotsPerRank, lar)
	}
	at := *s
	at.LAR = lar
	return &MicroBatches{&at, p, slotsPerRank}, nil
}

// Time returns the modelled time, in microseconds, of dispatch, routed experts and combine of a step with the given
// number of tokens on each rank, split into equal micro-batches. It does not include attention, which may overlap
// exchanges too.
func (m *MicroBatches) Time(tokensPerRank, batches int) float64 {
	tokens := (tokensPerRank + batches - 1) / batches
	return eps.H200.Time(eps.Cut{Pieces: batches, Piece: m.layer(tokens).piece(1), OneLink: true})
}

// Threshold returns the smallest number of tokens per rank, of the loads in the table, from which the split saves at
// least the given share of the time at every larger load. It returns 0 if there is none.
func (m *MicroBatches) Threshold(batches int, minSaved float64) int {
	from := 0
	for i := len(loads) - 1; i >= 0; i-- {
		if m.Time(loads[i], batches) > (1-minSaved)*m.Time(loads[i], 1) {
			break
		}
		from = loads[i]
	}
	return from
}

// Multiprocessors returns the number of a GPU's multiprocessors for exchanges with the shortest mean time of steps that
// are split into micro-batches, and the relative saving against the default of the exchange's kernels. It returns 0 if
// the number of multiprocessors of the GPU is unknown. Times are those of eps.Stages, as for Load.Multiprocessors.
func (m *MicroBatches) Multiprocessors(tokensPerRank []int, batches int) (communication int, saved float64) {
	all := multiprocessors[m.profile.GPU]
	if all == 0 || len(tokensPerRank) == 0 {
		return 0, 0
	}
	mean := func(n int) float64 {
		sum := 0.0
		for _, tokens := range tokensPerRank {
			one, part := m.layer(tokens).piece(1), m.layer((tokens+batches-1)/batches).piece(1)
			sum += stagesOf(one, part, batches).With(n, all, exchangeMultiprocessors).Time(batches)
		}
		return sum
	}
	usual := mean(exchangeMultiprocessors)
	communication = exchangeMultiprocessors
	best := usual
	for n := 2; n < exchangeMultiprocessors; n += 2 {
		if t := mean(n); t < best {
			communication, best = n, t
		}
	}
	return communication, 1 - best/usual
}

// layer returns the work of a rank with a number of tokens.
func (m *MicroBatches) layer(tokens int) *layer {
	return layerOf(&m.schedule.Model, m.profile, Inputs{Ranks: m.schedule.Ranks, SlotsPerRank: m.slots, LAR: m.schedule.LAR}, max(1, tokens))
}
