package placement

import (
	"context"
	"fmt"
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
	// ContiguousAlgorithm keeps the default placement: rank i holds the i'th run of experts.
	ContiguousAlgorithm Algorithm = "contiguous"
	// RoundRobinAlgorithm deals the experts out.
	RoundRobinAlgorithm Algorithm = "round-robin"
)

// Algorithms lists all algorithms.
var Algorithms = []Algorithm{Auto, ContiguousAlgorithm, RoundRobinAlgorithm}

// ParseAlgorithm returns the algorithm of that name.
func ParseAlgorithm(name string) (Algorithm, error) {
	for _, a := range Algorithms {
		if string(a) == name {
			return a, nil
		}
	}
	return "", fmt.Errorf("algorithm %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Algorithms), "[]"))
}

// Problem is what a placement is solved from.
type Problem struct {
	// Attention chooses the objective.
	Attention Attention
	// Ranks is the EP size; it must divide the number of experts.
	Ranks int
	// Layers are the model's indices of the MoE layers.
	Layers []int
	// Tokens are the counts of each MoE layer; needed with TensorParallel.
	Tokens []affinity.Counts
	// Pairs, where set, are the co-activations of each MoE layer (attention TP): experts are then placed for a forecast that
	// tells the occurrences of a token apart, no longer for its mean alone.
	Pairs []affinity.Pairs
	// Requests are the counts of each request; needed with DataParallel.
	Requests *affinity.RequestCounts
	// Algorithm chooses the method.
	Algorithm Algorithm
	// Seed makes the search repeatable.
	Seed uint64
	// Deadline cuts the search off; the zero time never does.
	Deadline time.Time
	// Progress, where set, is told how much of the work is done. Calls come from several goroutines.
	Progress func(done, total int)
}

// Result is a solved placement.
type Result struct {
	Placement *Placement
	// TrainLAR is the local activation rate on the profile with the best balanced assignment of tokens or requests, as the
	// search values it: optimistic, and comparable only between placements of one problem.
	TrainLAR float64
	// Truncated is set when the deadline cut the search off; the placement is valid all the same.
	Truncated bool
}

func (p *Problem) experts() int {
	if p.Attention == DataParallel {
		return p.Requests.Experts
	}
	return p.Tokens[0].Experts
}

func (p *Problem) validate() error {
	switch p.Attention {
	case DataParallel:
		if p.Requests == nil || len(p.Requests.Rows) == 0 || p.Requests.Layers != len(p.Layers) {
			return fmt.Errorf("attention dp needs the counts of at least one request over %d MoE layers", len(p.Layers))
		}
	case TensorParallel:
		if len(p.Tokens) == 0 || len(p.Tokens) != len(p.Layers) {
			return fmt.Errorf("attention tp needs the token counts of each of %d MoE layers; it has %d", len(p.Layers), len(p.Tokens))
		}
	default:
		return fmt.Errorf("attention %q is unknown; allowed is dp, tp", p.Attention)
	}
	return CheckRanks(p.Ranks, p.experts())
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

// Solve solves the problem. It returns the context's error when cancelled.
func Solve(ctx context.Context, p Problem) (Result, error) {
	if err := p.validate(); err != nil {
		return Result{}, err
	}
	switch p.Algorithm {
	case ContiguousAlgorithm:
		return Result{Placement: Contiguous(p.Layers, p.experts(), p.Ranks)}, nil
	case RoundRobinAlgorithm:
		return Result{Placement: RoundRobin(p.Layers, p.experts(), p.Ranks)}, nil
	case Auto:
		if p.Attention == DataParallel {
			return solveJoint(ctx, &p)
		}
		return solveLayers(ctx, &p)
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
