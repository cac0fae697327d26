package placement

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/solver/affinity"
)

// Attention says what is assigned to a rank: with data parallelism a whole request for all layers, with tensor
// parallelism each token in each layer.
type Attention string

// The attention modes.
const (
	DataParallel   Attention = "dp"
	TensorParallel Attention = "tp"
)

// Algorithm names a way to solve a Problem.
type Algorithm string

// The algorithms.
const (
	// Auto anneals the Gram matrix of the profile from several starts and alternates exact assignments.
	Auto Algorithm = "auto"
	// Alternating is a practical variant of Algorithm 1 of Sem-MoE: it clusters token ids (attention TP) or requests (DP) by their counts.
	Alternating Algorithm = "alternating"
	// AlternatingPrinted is Algorithm 1 of Sem-MoE as the paper prints it: it clusters requests by what the token table forecasts for them.
	AlternatingPrinted Algorithm = "alternating-printed"
	// CrossEntropy is a practical variant of the cross-entropy method of Speculative MoE: it samples experts, and rows follow greedily.
	CrossEntropy Algorithm = "cross-entropy"
	// CrossEntropyPrinted samples tokens and experts jointly, as the paper does.
	CrossEntropyPrinted Algorithm = "cross-entropy-printed"
	// KMeans2D is balanced two-dimensional k-means.
	KMeans2D Algorithm = "kmeans2d"
	// EPLB balances expert load alone, as DeepSeek's load balancer does.
	EPLB Algorithm = "eplb"
	// Coactivation keeps experts together that single tokens activate together.
	Coactivation Algorithm = "coactivation"
	// ExFlow keeps tokens on their rank from layer to layer.
	ExFlow Algorithm = "exflow"
	// MoETuner does so with clusters of balanced load.
	MoETuner Algorithm = "moetuner"
	// ContiguousAlgorithm keeps the default placement: rank i holds the i'th run of experts.
	ContiguousAlgorithm Algorithm = "contiguous"
	// RoundRobinAlgorithm deals the experts out.
	RoundRobinAlgorithm Algorithm = "round-robin"
)

// Algorithms lists all algorithms.
var Algorithms = []Algorithm{
	Auto, Alternating, AlternatingPrinted, CrossEntropy, CrossEntropyPrinted, KMeans2D, EPLB, Coactivation, ExFlow, MoETuner, ContiguousAlgorithm,
	RoundRobinAlgorithm,
}

// ParseAlgorithm returns the algorithm of that name.
func ParseAlgorithm(name string) (Algorithm, error) {
	for _, a := range Algorithms {
		if string(a) == name {
			return a, nil
		}
	}
	return "", fmt.Errorf("algorithm %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Algorithms), "[]"))
}

// warm reports whether the search goes on from the placement in service alone.
func (p *Problem) warm() bool { return p.Current != nil && !p.Fresh }

// timed reports whether placements are searched for by time.
func (p *Problem) timed() bool { return p.Algorithm == Auto && p.Clock != nil }

// DefaultShrinkage is the Shrinkage of the highest held-out locality on recorded routing; between 2 and 8 it differs by less than 0.2%.
const DefaultShrinkage = 4

// Problem is what a placement is solved from.
type Problem struct {
	// Attention tells whether tokens or requests have a rank.
	Attention Attention
	// Messages are the objective where it is to send few of them (Objective.Messages); the zero value is the objective
	// Activation. Auto searches for it, by Occurrences, which it then needs.
	Messages    affinity.Messages
	Occurrences *affinity.Occurrences
	// Clock is the modelled time of a layer, where the objective is Time: Auto then searches for the placement of the least time, and returns
	// a front. Starts are further placements that the search improves.
	Clock  *Clock
	Starts []*Placement
	// Constraints narrow what may be chosen.
	Constraints Constraints
	// Ranks is the EP size; it must divide the number of experts.
	Ranks int
	// RedundantSlots is the number of slots per rank beyond experts / ranks: they hold copies of experts of other ranks.
	// Auto, EPLB, Contiguous and RoundRobin fill them.
	RedundantSlots int
	// CopyRule is how the engine chooses among copies. The placement carries it, and with attention DP is searched for it.
	CopyRule CopyRule
	// Groups is the number of groups of a gate that chooses groups of experts first: equal runs of consecutive experts. The
	// slots of the placement then are a permutation of the experts that maps groups onto groups. Either Groups or Ranks must
	// divide the other. 0 or 1 is no constraint. Auto and Contiguous keep it.
	Groups int
	// Layers are the model's indices of the MoE layers.
	Layers []int
	// Tokens are the counts of each MoE layer; needed with TensorParallel, or LoadTokens in their place.
	Tokens []affinity.Counts
	// LoadTokens returns the counts of one MoE layer: Auto asks for each once (with Constraints up to three times), for as
	// many at a time as there are processors. Calls come from several goroutines.
	LoadTokens func(layer int) (*affinity.Counts, error)
	// Experts is needed with LoadTokens alone; elsewhere the counts tell.
	Experts int
	// Current is the placement in service, if any. Auto then starts from it, which is much faster than from nothing, and
	// names ranks so that few experts move.
	Current *Placement
	// Fresh has Auto start from nothing all the same, as for a Current that was solved for other traffic: that is then one
	// candidate among others, what moves are counted from, and what ranks are named after.
	Fresh bool
	// Pairs are the co-activations of each MoE layer. Coactivation needs them; where Auto has them (attention TP), it places
	// experts for a forecast that tells the occurrences of a token apart, no longer for its mean alone.
	Pairs []affinity.Pairs
	// Transitions are, for each MoE layer but the last, how often a token activated an expert there and one in the next MoE
	// layer [N × N]; ExFlow and MoETuner need them.
	Transitions [][]float32
	// Requests are the counts of each request; needed with DataParallel.
	Requests *affinity.RequestCounts
	// Prompts are the token ids of each request. AlternatingPrinted needs them, and Tokens, in both attention modes.
	Prompts [][]int32
	// ProfileTokens is how many tokens the profile has where Requests are a sample of it; 0 stands for theirs.
	ProfileTokens float64
	// Shrinkage is how many occurrences of the mean token Auto adds to those of each token id (attention TP), because what a rare
	// one activated is chance for the most part. At 0 the profile is taken at its face value.
	Shrinkage float64
	// Algorithm chooses the method.
	Algorithm Algorithm
	// Seed makes the search repeatable.
	Seed uint64
	// Deadline cuts the search off; the zero time never does.
	Deadline time.Time
	// Progress, where set, is told how much of the work is done. Calls come from several goroutines.
	Progress func(done, total int)

	// each and base are set where groups stand for experts: the experts of one, and how many of each layer move whatever is
	// chosen.
	each int
	base []int
}

// Result is a solved placement.
type Result struct {
	Placement *Placement
	// TrainLAR is the local activation rate on the profile with the best balanced assignment of tokens or requests, as the
	// search values it: optimistic, and comparable only between placements of one problem. Only Auto fills it.
	TrainLAR float64
	// Front are the placements that a search by time found under descending limits on the load of a rank's experts; the first has no limit. It is
	// nil with other objectives and algorithms.
	Front []Point
	// Truncated is set when the deadline cut the search off; the placement is valid all the same.
	Truncated bool
	// Unmet says which load limits the placement does not keep on the profile, one sentence each.
	Unmet []string
	// RowRanks are the ranks of the rows that the algorithm clusters together with the experts: by MoE layer with attention TP, once with
	// attention DP. The rows of AlternatingPrinted are Prompts. Those of CrossEntropyPrinted are the token ids that occur, in ascending
	// order, or with attention DP Requests. Other algorithms leave it nil.
	RowRanks [][]int
}

func (p *Problem) experts() int {
	if p.Attention == DataParallel {
		return p.Requests.Experts
	}
	if p.LoadTokens != nil {
		return p.Experts
	}
	return p.Tokens[0].Experts
}

func (p *Problem) layerCounts(l int) (*affinity.Counts, error) {
	if p.LoadTokens != nil {
		return p.LoadTokens(l)
	}
	return &p.Tokens[l], nil
}

// profileTokens is how many tokens the profile has (attention DP).
func (p *Problem) profileTokens() float64 { return cmp.Or(p.ProfileTokens, p.Requests.TokenCount()) }

// pairs are those of a layer, or nil.
func (p *Problem) pairs(l int) *affinity.Pairs {
	if p.Pairs == nil {
		return nil
	}
	return &p.Pairs[l]
}

func (p *Problem) validate() error {
	switch p.Attention {
	case DataParallel:
		if p.Requests == nil || len(p.Requests.Rows) == 0 || p.Requests.Layers != len(p.Layers) {
			return fmt.Errorf("attention dp needs the counts of at least one request over %d MoE layers", len(p.Layers))
		}
	case TensorParallel:
		if p.LoadTokens != nil && p.Algorithm != Auto {
			return fmt.Errorf("algorithm %s does not load counts layer by layer", p.Algorithm)
		}
		if p.LoadTokens == nil && (len(p.Tokens) == 0 || len(p.Tokens) != len(p.Layers)) {
			return fmt.Errorf("attention tp needs the token counts of each of %d MoE layers; it has %d", len(p.Layers), len(p.Tokens))
		}
	default:
		return fmt.Errorf("attention %q is unknown; allowed is dp, tp", p.Attention)
	}
	if p.Algorithm == AlternatingPrinted && (len(p.Prompts) == 0 || len(p.Tokens) != len(p.Layers)) {
		return fmt.Errorf("algorithm %s needs the token ids of at least one request and the token counts of each of %d MoE layers", p.Algorithm, len(p.Layers))
	}
	if err := CheckRanks(p.Ranks, p.experts()); err != nil {
		return err
	}
	if err := p.checkCurrent(); err != nil {
		return err
	}
	if err := CheckGroups(p.Algorithm, p.Ranks, p.experts(), p.RedundantSlots, p.Groups); err != nil {
		return err
	}
	if err := CheckConstraints(p.Algorithm, p.Constraints, p.Layers, p.experts(), p.Ranks, p.RedundantSlots, p.Current != nil); err != nil {
		return err
	}
	if o := p.Occurrences; !p.Messages.None() && (p.Algorithm == Auto || p.Constraints.Binding()) && (o == nil || o.Len() == 0 || len(o.Layers) != len(p.Layers) || o.Experts != p.experts()) {
		return fmt.Errorf("an objective of messages needs a sample of the tokens of %d MoE layers", len(p.Layers))
	}
	return CheckSlots(p.Algorithm, p.Ranks, p.experts(), p.RedundantSlots)
}

// CheckSlots refuses redundant slots that an algorithm does not know, and more of them than there are experts for.
func CheckSlots(a Algorithm, ranks, experts, redundant int) error {
	most := experts - experts/ranks
	if redundant < 0 || redundant > most {
		return fmt.Errorf("%d redundant slots per rank; %d experts on %d ranks allow 0 to %d", redundant, experts, ranks, most)
	}
	if redundant > 0 && !slices.Contains([]Algorithm{Auto, EPLB, ContiguousAlgorithm, RoundRobinAlgorithm}, a) {
		return fmt.Errorf("algorithm %s knows no redundant slots", a)
	}
	return nil
}

// CheckRanks refuses an EP size that does not divide the number of experts.
func CheckRanks(ranks, experts int) error {
	if ranks >= 1 && ranks <= experts && experts%ranks == 0 {
		return nil
	}
	var allowed []string
	for d := 1; d <= experts; d++ {
		if experts%d == 0 {
			allowed = append(allowed, fmt.Sprint(d))
		}
	}
	return fmt.Errorf("EP size %d does not divide the %d experts; allowed is %s", ranks, experts, strings.Join(allowed, ", "))
}

// Solve solves the problem. It returns the context's error when cancelled, and an error where pins, groups and the move
// budget contradict one another.
func Solve(ctx context.Context, p Problem) (Result, error) {
	if err := p.validate(); err != nil {
		return Result{}, err
	}
	result, err := p.solve(ctx)
	if err != nil {
		return Result{}, err
	}
	p.obey(&result, limit{ctx, p.Deadline})
	if !p.Constraints.Any() {
		return result, nil
	}
	return result, p.inspect(ctx, &result)
}

func (p *Problem) solve(ctx context.Context) (Result, error) {
	switch p.Algorithm {
	case ContiguousAlgorithm:
		if p.Constraints.Binding() {
			return solveAuto(ctx, p)
		}
		return Result{Placement: p.simple(func(e int) int { return e * p.Ranks / p.experts() })}, nil
	case RoundRobinAlgorithm:
		return Result{Placement: p.simple(func(e int) int { return e % p.Ranks })}, nil
	case Alternating:
		return solveRows(ctx, p, placingOnly(alternate))
	case AlternatingPrinted:
		return solveRows(ctx, p, alternatePrinted)
	case CrossEntropy:
		return solveRows(ctx, p, placingOnly(crossEntropy))
	case CrossEntropyPrinted:
		return solveRows(ctx, p, crossEntropyPrinted)
	case KMeans2D:
		return solveRows(ctx, p, placingOnly(kmeans2D))
	case EPLB:
		return solveEPLB(ctx, p)
	case Coactivation:
		return solveCoactivation(ctx, p)
	case ExFlow:
		return solveChain(ctx, p, false)
	case MoETuner:
		return solveChain(ctx, p, true)
	case Auto:
		return solveAuto(ctx, p)
	default:
		_, err := ParseAlgorithm(string(p.Algorithm))
		return Result{}, err
	}
}

// limit tells a search when to stop: on cancellation, or when the time budget is spent.
type limit struct {
	ctx      context.Context
	deadline time.Time
}

func (l limit) overdue() bool { return !l.deadline.IsZero() && time.Now().After(l.deadline) }

func (l limit) reached() bool { return l.ctx.Err() != nil || l.overdue() }
