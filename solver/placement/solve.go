// SPDX-License-Identifier: Apache-2.0

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

// Attention is the attention mode, which defines what is assigned to a rank: with data parallelism a whole request for
// all layers, with tensor parallelism each token in each layer.
type Attention string

// Supported attention modes.
const (
	DataParallel   Attention = "dp"
	TensorParallel Attention = "tp"
)

// Algorithm names an algorithm that solves a Problem.
type Algorithm string

// Supported algorithms.
const (
	// Auto anneals the Gram matrix of the profile from several starts, and alternates exact assignments.
	Auto Algorithm = "auto"
	// Alternating is a practical variant of Algorithm 1 of Sem-MoE: it clusters token IDs (attention TP) or requests
	// (DP) by their counts.
	Alternating Algorithm = "alternating"
	// AlternatingPrinted is Algorithm 1 of Sem-MoE as printed in the paper: it clusters requests by the forecast of the
	// token table.
	AlternatingPrinted Algorithm = "alternating-printed"
	// CrossEntropy is a practical variant of the cross-entropy method of Speculative MoE: it samples experts, and
	// assigns rows greedily.
	CrossEntropy Algorithm = "cross-entropy"
	// CrossEntropyPrinted samples tokens and experts jointly, as in the paper.
	CrossEntropyPrinted Algorithm = "cross-entropy-printed"
	// KMeans2D is balanced two-dimensional k-means.
	KMeans2D Algorithm = "kmeans2d"
	// EPLB balances only expert load, as DeepSeek's load balancer does.
	EPLB Algorithm = "eplb"
	// Coactivation groups experts that single tokens activate together.
	Coactivation Algorithm = "coactivation"
	// ExFlow keeps tokens on their rank from layer to layer.
	ExFlow Algorithm = "exflow"
	// MoETuner is ExFlow with clusters of balanced load.
	MoETuner Algorithm = "moetuner"
	// ContiguousAlgorithm returns the default placement: rank i contains the i'th run of experts.
	ContiguousAlgorithm Algorithm = "contiguous"
	// RoundRobinAlgorithm assigns the experts round-robin.
	RoundRobinAlgorithm Algorithm = "round-robin"
)

// Algorithms lists all algorithms.
var Algorithms = []Algorithm{
	Auto, Alternating, AlternatingPrinted, CrossEntropy, CrossEntropyPrinted, KMeans2D, EPLB, Coactivation, ExFlow, MoETuner, ContiguousAlgorithm,
	RoundRobinAlgorithm,
}

// ParseAlgorithm returns the algorithm with the given name.
func ParseAlgorithm(name string) (Algorithm, error) {
	for _, a := range Algorithms {
		if string(a) == name {
			return a, nil
		}
	}
	return "", fmt.Errorf("algorithm %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Algorithms), "[]"))
}

// warm reports whether the search starts only from the placement in service.
func (p *Problem) warm() bool { return p.Current != nil && !p.Fresh }

// timed reports whether the search minimizes modelled time.
func (p *Problem) timed() bool { return p.Algorithm == Auto && p.Clock != nil }

// DefaultShrinkage maximizes held-out locality on recorded routing. Between 2 and 8 the locality differs by less than
// 0.2%.
const DefaultShrinkage = 4

// Problem is a placement problem.
type Problem struct {
	// Attention defines whether tokens or requests have a rank.
	Attention Attention
	// Messages are the message weights of the objective (Objective.Messages); the zero value is the objective
	// Activation. Auto minimizes them on Occurrences, which are then required.
	Messages    affinity.Messages
	Occurrences *affinity.Occurrences
	// Clock is the time model of a layer for the objective Time. Auto then minimizes the modelled time and returns a
	// front. Starts are additional starting placements.
	Clock  *Clock
	Starts []*Placement
	// Constraints restrict the placement.
	Constraints Constraints
	// Ranks is the EP size; it must divide the number of experts.
	Ranks int
	// RedundantSlots is the number of slots per rank in excess of experts / ranks, for copies of experts of other
	// ranks. Auto, EPLB, Contiguous and RoundRobin fill them.
	RedundantSlots int
	// CopyRule is the engine's rule for choosing among copies. The placement contains it, and with attention DP the
	// search optimizes for it.
	CopyRule CopyRule
	// Groups is the number of groups of a gate that first chooses groups of experts: equal runs of consecutive experts.
	// The slots of the placement are then a permutation of the experts that maps groups onto groups. Either Groups or
	// Ranks must divide the other. 0 or 1 is no constraint. Auto and Contiguous respect it.
	Groups int
	// Layers are the model's indices of the MoE layers.
	Layers []int
	// Tokens are the counts of each MoE layer. TensorParallel requires them or LoadTokens.
	Tokens []affinity.Counts
	// LoadTokens returns the counts of one MoE layer. Auto calls it once for each layer (with Constraints up to three
	// times), for as many layers concurrently as there are processors.
	LoadTokens func(layer int) (*affinity.Counts, error)
	// Experts is only required with LoadTokens; otherwise the counts contain it.
	Experts int
	// Current is the placement in service, if any. Auto then starts from it, which is much faster than a start from
	// scratch, and numbers ranks such that few experts move.
	Current *Placement
	// Fresh makes Auto start from scratch although Current is set, for example if Current was solved for other traffic.
	// Current is then one of the candidates, the reference for moves, and the reference for numbering ranks.
	Fresh bool
	// Pairs are the co-activations of each MoE layer. Coactivation requires them. If set, Auto (attention TP) places
	// experts for a forecast that distinguishes the occurrences of a token, instead of its mean.
	Pairs []affinity.Pairs
	// Transitions contains, for each MoE layer but the last, how often a token activated an expert in this layer and an
	// expert in the next MoE layer [N × N]. ExFlow and MoETuner require them.
	Transitions [][]float32
	// Requests are the counts of each request. DataParallel requires them.
	Requests *affinity.RequestCounts
	// Prompts are the token IDs of each request. AlternatingPrinted requires them and Tokens, in both attention modes.
	Prompts [][]int32
	// ProfileTokens is the number of tokens of the profile if Requests are a sample of it; 0 means the number of tokens
	// of Requests.
	ProfileTokens float64
	// MaxRows is the maximum number of token IDs that are clustered together with the experts (attention TP), the most
	// frequent ones; 0 means no limit.
	MaxRows int
	// Shrinkage is the number of occurrences of the mean token that Auto adds to those of each token ID (attention TP),
	// because the activations of rare token IDs are mostly noise. 0 disables it.
	Shrinkage float64
	// Algorithm is the algorithm.
	Algorithm Algorithm
	// Seed makes the search reproducible.
	Seed uint64
	// Deadline limits the search; the zero time means no limit.
	Deadline time.Time
	// Progress, if set, receives the number of finished steps. It is called from several goroutines.
	Progress func(done, total int)

	// each and base are set if groups are placed in place of experts: the number of experts of a group, and the number
	// of unavoidable moves in each layer.
	each int
	base []int
}

// Result is a solved placement.
type Result struct {
	Placement *Placement
	// TrainLAR is the local activation rate on the profile with the best balanced assignment of tokens or requests, by
	// the value function of the search. It is optimistic, and comparable only between placements of one problem. Only
	// Auto sets it.
	TrainLAR float64
	// Front contains the placements of a search by time under descending limits on the load of a rank's experts. The
	// first one has no limit. It is nil for other objectives and algorithms.
	Front []Point
	// Truncated is set if the deadline cut off the search. The placement is still valid.
	Truncated bool
	// Unmet lists the load limits that the placement exceeds on the profile, one sentence each.
	Unmet []string
	// RowRanks are the ranks of the rows that the algorithm clusters together with the experts: by MoE layer with
	// attention TP, once with attention DP. The rows of AlternatingPrinted are Prompts. The rows of CrossEntropyPrinted
	// are the token IDs that occur, in ascending order, or Requests with attention DP. It is nil for other algorithms.
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

// profileTokens returns the number of tokens of the profile (attention DP).
func (p *Problem) profileTokens() float64 { return cmp.Or(p.ProfileTokens, p.Requests.TokenCount()) }

// pairs returns the co-activations of a layer, or nil.
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
		return fmt.Errorf("message objectives need a sample of the tokens of %d MoE layers", len(p.Layers))
	}
	return CheckSlots(p.Algorithm, p.Ranks, p.experts(), p.RedundantSlots)
}

// CheckSlots returns an error for redundant slots that the algorithm does not support, or for more of them than experts
// of other ranks.
func CheckSlots(a Algorithm, ranks, experts, redundant int) error {
	most := experts - experts/ranks
	if redundant < 0 || redundant > most {
		return fmt.Errorf("%d redundant slots per rank; %d experts on %d ranks allow 0 to %d", redundant, experts, ranks, most)
	}
	if redundant > 0 && !slices.Contains([]Algorithm{Auto, EPLB, ContiguousAlgorithm, RoundRobinAlgorithm}, a) {
		return fmt.Errorf("algorithm %s does not support redundant slots", a)
	}
	return nil
}

// CheckRanks returns an error for an EP size that does not divide the number of experts.
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

// Solve solves the problem. It returns the context's error on cancellation, and an error if pins, groups and the move
// budget are infeasible.
func Solve(ctx context.Context, p Problem) (Result, error) {
	if err := p.validate(); err != nil {
		return Result{}, err
	}
	result, err := p.solve(ctx)
	if err != nil {
		return Result{}, err
	}
	p.applyCopyRule(&result, limit{ctx, p.Deadline})
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

// limit stops a search on cancellation, or when the time budget is exhausted.
type limit struct {
	ctx      context.Context
	deadline time.Time
}

func (l limit) overdue() bool { return !l.deadline.IsZero() && time.Now().After(l.deadline) }

func (l limit) reached() bool { return l.ctx.Err() != nil || l.overdue() }
