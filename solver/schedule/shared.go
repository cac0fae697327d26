package schedule

import (
	"fmt"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/pipeline/eps"
)

// Kernel is how the products of a rank's experts are done.
type Kernel string

// One kernel for all experts of a group, or one for each.
const (
	Grouped Kernel = "grouped"
	Dense   Kernel = "dense"
)

// Load is what is best at one load of the ranks.
type Load struct {
	// TokensPerRank is what each rank's attention hands to the experts at once.
	TokensPerRank int `json:"tokens_per_rank"`
	// Groups is the number of equal groups that a rank's experts are worked off in; with 1 nothing overlaps.
	Groups int    `json:"groups"`
	Kernel Kernel `json:"kernel"`
	// Multiprocessors is how many of a GPU's the exchanges are to have; absent with one group, and where it is not known how many
	// the GPU has.
	Multiprocessors int `json:"communication_multiprocessors,omitempty"`
	// Time is that of dispatch, routed experts and combine, in microseconds, Ungrouped that with one group.
	Time      float64 `json:"us"`
	Ungrouped float64 `json:"ungrouped_us"`
}

// loads are those of the table: from decoding to what is held at once.
var loads = []int{128, 256, 512, 1024, 2048, 4096, 8192, 16384}

const (
	// maxGroups is the most that was measured.
	maxGroups = 16
	// exchangeMultiprocessors is as many as an exchange is taken to have in the profile, and to be able to use: what DeepEP's kernels have by default.
	exchangeMultiprocessors = 20
)

// multiprocessors are those of the GPUs that profiles name.
var multiprocessors = map[string]int{"NVIDIA H100 80GB HBM3": 132, "NVIDIA H200": 132}

// layer is what a rank has to do in a MoE layer at some load.
type layer struct {
	profile *hardware.Profile
	kernel  Kernel
	// weights are those of one matrix of an expert, experts the rank's, rows the tokens of each of these.
	weights, experts, rows float64
	// bytes leave the rank, and as many arrive.
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

// piece is one of so many equal groups of experts, with the tokens for these.
func (l *layer) piece(groups int) eps.Piece {
	exchange := l.profile.AllToAll.Microseconds(l.bytes / float64(groups))
	return eps.Piece{Dispatch: exchange, Experts: l.products(l.experts / float64(groups)), Combine: exchange}
}

// products are gate with up, and down, of so many experts.
func (l *layer) products(experts float64) float64 {
	if l.kernel == Grouped {
		return l.profile.Grouped.Block(experts*l.weights, l.rows)
	}
	return experts * l.profile.Dense.Block(l.weights, l.rows)
}

// stages are those of the layer with a start-up time and work that is parted, by the line through one piece and two.
func (l *layer) stages() eps.Stages {
	one, two := l.piece(1), l.piece(2)
	part := func(whole, half float64) eps.Part {
		work := max(0, 2*(whole-half))
		return eps.Part{Start: whole - work, Work: work}
	}
	return eps.Stages{
		Dispatch: part(one.Dispatch, two.Dispatch), Experts: part(one.Experts, two.Experts), Combine: part(one.Combine, two.Combine), OneLink: true,
	}
}

// sharedRanks chooses for each load. Exchanges take turns on one stream, as in engines, and slow the products down as they were measured to.
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
