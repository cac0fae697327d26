// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/pipeline/eps"
)

// Kernel is the kind of GEMM kernel for a rank's experts.
type Kernel string

// Supported kernels: one for all experts of a group, or one for each expert.
const (
	Grouped Kernel = "grouped"
	Dense   Kernel = "dense"
)

// Load is the best schedule at one load of the ranks.
type Load struct {
	// TokensPerRank is the number of tokens that each rank's attention passes to the experts at once.
	TokensPerRank int `json:"tokens_per_rank"`
	// Groups is the number of equal groups into which a rank's experts are divided. With 1, nothing overlaps.
	Groups int    `json:"groups"`
	Kernel Kernel `json:"kernel"`
	// Multiprocessors is the number of a GPU's multiprocessors for the exchanges. It is absent with one group, and if
	// the number of multiprocessors of the GPU is unknown.
	Multiprocessors int `json:"communication_multiprocessors,omitempty"`
	// Time is the time of dispatch, routed experts and combine, in microseconds. Ungrouped is the time with one group.
	Time      float64 `json:"us"`
	Ungrouped float64 `json:"ungrouped_us"`
}

// loads are the loads in the table: from decoding to tokensHeld.
var loads = []int{128, 256, 512, 1024, 2048, 4096, 8192, 16384}

const (
	// maxGroups is the largest measured number of groups.
	maxGroups = 16
	// exchangeMultiprocessors is the assumed number of multiprocessors of an exchange in the profile, and the maximum
	// that it can use: the default of DeepEP's kernels.
	exchangeMultiprocessors = 20
)

// multiprocessors are the numbers of multiprocessors by GPU name in profiles.
var multiprocessors = map[string]int{"NVIDIA H100 80GB HBM3": 132, "NVIDIA H200": 132}

// layer is the work of a rank in a MoE layer at some load.
type layer struct {
	profile *hardware.Profile
	kernel  Kernel
	// weights is the number of weights of one matrix of an expert, experts the number of the rank's experts, rows the
	// number of tokens of each expert.
	weights, experts, rows float64
	// bytes is the number of bytes that the rank sends, and also receives.
	bytes float64
}

func layerOf(shape *pipeline.Shape, p *hardware.Profile, in Inputs, tokens int) *layer {
	activations := float64(tokens * shape.TopK)
	l := &layer{
		profile: p, kernel: Dense, weights: float64(shape.Hidden) * float64(shape.ExpertSize), experts: float64(in.SlotsPerRank), rows: activations / float64(in.SlotsPerRank),
		bytes: activations * (1 - in.LAR) * float64(shape.Hidden) * bf16Bytes,
	}
	if p.Choose(float64(shape.Hidden), float64(shape.ExpertSize), l.experts, l.rows).Grouped {
		l.kernel = Grouped
	}
	return l
}

// piece returns the work of one of the given number of equal groups of experts with their tokens.
func (l *layer) piece(groups int) eps.Piece {
	exchange := l.profile.AllToAll.Microseconds(l.bytes / float64(groups))
	return eps.Piece{Dispatch: exchange, Experts: l.products(l.experts / float64(groups)), Combine: exchange}
}

// products returns the time of the gate and up projection, and of the down projection, of a number of experts.
func (l *layer) products(experts float64) float64 {
	if l.kernel == Grouped {
		return l.profile.Grouped.Block(experts*l.weights, l.rows)
	}
	return experts * l.profile.Dense.Block(l.weights, l.rows)
}

// stages returns the stages of the layer, by the line through one piece and two.
func (l *layer) stages() eps.Stages { return stagesOf(l.piece(1), l.piece(2), 2) }

// stagesOf returns stages with a start-up time and divisible work each, by the line through the whole and a part of it.
func stagesOf(whole, part eps.Piece, parts int) eps.Stages {
	divide := func(whole, part float64) eps.Part {
		work := max(0, (whole-part)*float64(parts)/float64(parts-1))
		return eps.Part{Start: whole - work, Work: work}
	}
	return eps.Stages{
		Dispatch: divide(whole.Dispatch, part.Dispatch), Experts: divide(whole.Experts, part.Experts), Combine: divide(whole.Combine, part.Combine), OneLink: true,
	}
}

// sharedRanks chooses the groups for each load. Exchanges run one after another on one stream, as in engines, and slow
// the GEMMs down by the measured factor.
func sharedRanks(shape *pipeline.Shape, p *hardware.Profile, in Inputs) ([]Load, error) {
	var list []Load
	for _, tokens := range loads {
		l := layerOf(shape, p, in, tokens)
		var cuts []eps.Cut
		times := map[int]float64{}
		for groups := 1; groups <= min(maxGroups, in.SlotsPerRank); groups++ {
			if in.SlotsPerRank%groups == 0 {
				cut := eps.Cut{Pieces: groups, Piece: l.piece(groups), OneLink: true}
				cuts = append(cuts, cut)
				times[groups] = eps.H200.Time(cut)
			}
		}
		groups, err := eps.H200.Choose(cuts)
		if err != nil {
			return nil, fmt.Errorf("%d tokens per rank: %w", tokens, err)
		}
		load := Load{TokensPerRank: tokens, Groups: groups, Kernel: l.kernel, Time: times[groups], Ungrouped: times[1]}
		if all := multiprocessors[p.GPU]; all > 0 && groups > 1 {
			load.Multiprocessors, _, _ = l.stages().Share(all, exchangeMultiprocessors, groups)
		}
		list = append(list, load)
	}
	return list, nil
}

func (l *Load) check() error {
	switch {
	case l.Groups < 1:
		return fmt.Errorf("groups is %d; it must be at least 1", l.Groups)
	case l.Kernel != Grouped && l.Kernel != Dense:
		return fmt.Errorf("kernel is %q; allowed is %s, %s", l.Kernel, Grouped, Dense)
	case l.Multiprocessors < 0:
		return fmt.Errorf("communication_multiprocessors is %d; it must be at least 0", l.Multiprocessors)
	case !(l.Time > 0) || !(l.Ungrouped > 0):
		return fmt.Errorf("us is %v, ungrouped_us %v; both must be above 0", l.Time, l.Ungrouped)
	}
	return nil
}
