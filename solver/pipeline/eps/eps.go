package eps

import (
	"fmt"
	"math"
)

// Trade is what the paper weighs: N groups hide (N-1)/N of the shorter of communication and computation (Hidden, C), and each costs Group (k);
// Fixed (b) is paid once.
type Trade struct{ Hidden, Group, Fixed float64 }

// Gain is the time saved by N groups over none.
func (t Trade) Gain(groups int) float64 {
	n := float64(groups)
	return t.Hidden*(n-1)/n - t.Group*n - t.Fixed
}

// Optimum is where the gain is greatest, the root of C/k, as a real number.
func (t Trade) Optimum() float64 { return math.Sqrt(t.Hidden / t.Group) }

// Groups is the best number of groups up to a most, the experts of the rank. It is 1 where no number gains anything.
func (t Trade) Groups(most int) int {
	best, gain := 1, 0.0
	for _, n := range []float64{math.Floor(t.Optimum()), math.Ceil(t.Optimum())} {
		groups := int(max(1, min(n, float64(most))))
		if g := t.Gain(groups); groups > 1 && g > gain {
			best, gain = groups, g
		}
	}
	return best
}

// TradeOf is the trade, without fixed costs, that explains the gains measured with two numbers of groups.
func TradeOf(groupsA int, gainA float64, groupsB int, gainB float64) (Trade, error) {
	a, b := float64(groupsA), float64(groupsB)
	if groupsA < 1 || groupsB < 1 || groupsA == groupsB {
		return Trade{}, fmt.Errorf("the gains are of %d and %d groups; two different numbers are needed, both at least 1", groupsA, groupsB)
	}
	// Two linear equations: hidden (n-1)/n - group n = gain.
	partA, partB := (a-1)/a, (b-1)/b
	determinant := partB*a - partA*b
	t := Trade{Hidden: (gainB*a - gainA*b) / determinant, Group: (partA*gainB - partB*gainA) / determinant}
	if !(t.Hidden > 0) || !(t.Group > 0) {
		return t, fmt.Errorf("gains of %v with %d groups and %v with %d leave nothing to weigh: %v hidden, %v for each group", gainA, groupsA, gainB, groupsB, t.Hidden, t.Group)
	}
	return t, nil
}

// Part is what a stage takes for one of N groups: Start + Work/N.
type Part struct{ Start, Work float64 }

// of is the time of one group.
func (p Part) of(groups int) float64 { return p.Start + p.Work/float64(groups) }

// Stages are those of a MoE layer on a rank.
type Stages struct {
	Dispatch, Experts, Combine Part
	// Shared is the time of the shared experts, which are done while the first group's tokens are on their way; 0 without any.
	Shared float64
	// OneLink says that dispatch and combine use the same streaming multiprocessors, and so take turns.
	OneLink bool
}

// Time is that of the layer with N groups.
//
// On one link all groups are dispatched before any is combined: so the experts never wait longer than they must, and combines, which are as
// much work whenever they are done, lose nothing.
func (s Stages) Time(groups int) float64 {
	dispatch, work, combine := s.Dispatch.of(groups), s.Experts.of(groups), s.Combine.of(groups)
	computed, combined := s.Shared, 0.0
	if s.OneLink {
		combined = float64(groups) * dispatch
	}
	for n := 1; n <= groups; n++ {
		computed = max(computed, float64(n)*dispatch) + work
		combined = max(combined, computed) + combine
	}
	return combined
}

// Best is the number of groups up to a most, the experts of the rank, with the least time; of equal ones the fewest. One group is
// the baseline.
func (s Stages) Best(most int) (groups int, time float64) {
	groups, time = 1, s.Time(1)
	for n := 2; n <= most; n++ {
		if t := s.Time(n); t < time {
			groups, time = n, t
		}
	}
	return groups, time
}

// Share finds how many of a GPU's multiprocessors communication is to have, in pairs as kernels take them, and the number of groups with it.
// The stages' times are of communication that has as many as it can use (enough), and of experts that have all. With fewer, communication
// takes longer in proportion, as experts do.
func (s Stages) Share(all, enough, most int) (communication, groups int, time float64) {
	time = math.Inf(1)
	for n := 2; n <= min(enough, all-1); n += 2 {
		slower, rest := float64(enough)/float64(n), float64(all)/float64(all-n)
		shared := s
		shared.Dispatch.Work, shared.Combine.Work = s.Dispatch.Work*slower, s.Combine.Work*slower
		shared.Experts.Work, shared.Shared = s.Experts.Work*rest, s.Shared*rest
		if g, t := shared.Best(most); t < time {
			communication, groups, time = n, g, t
		}
	}
	return communication, groups, time
}

// ActivatedExperts is how many of the experts that many tokens activate in the mean, if each takes topK of them at random.
func ActivatedExperts(tokens, experts, topK int) float64 {
	if topK >= experts {
		return float64(experts)
	}
	return -math.Expm1(float64(tokens)*math.Log1p(-float64(topK)/float64(experts))) * float64(experts)
}

// Destinations is the number of distinct ranks that hold a token's experts, in the mean, if it takes topK of them at random: it is
// at least 1 and at most the lower of topK and ranks. Ranks must divide experts.
func Destinations(experts, topK, ranks int) float64 {
	// A rank is missed if all are drawn from the experts of others.
	missed, others := 1.0, experts-experts/ranks
	for drawn := range topK {
		missed *= max(0, float64(others-drawn)) / float64(experts-drawn)
	}
	return float64(ranks) * (1 - missed)
}

// ExpertParallelBytes is what attention DP with expert parallelism moves between the ranks in a layer, there and back, when each token goes to
// that many ranks (see Destinations): tokens together have so many bytes, and one in ranks stays where it is.
func ExpertParallelBytes(bytes float64, ranks int, destinations float64) float64 {
	return destinations * 2 * bytes * float64(ranks-1) / float64(ranks)
}

// TensorParallelBytes is what the all-reduce after tensor-parallel experts moves: every rank sends 2 (ranks-1)/ranks of the tokens, which all
// ranks have.
func TensorParallelBytes(bytes float64, ranks int) float64 { return 2 * bytes * float64(ranks-1) }
