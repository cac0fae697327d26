package solver

import (
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// timedBaselines are the published algorithms whose placements are candidates of a search by time, and starts of it. Others are slow, or have not
// been seen to be ahead.
var timedBaselines = []placement.Algorithm{placement.EPLB, placement.MoETuner, placement.ExFlow, placement.KMeans2D}

// timedCandidate is a placement that a search by time chooses among.
type timedCandidate struct {
	name      string
	algorithm placement.Algorithm
	placement *placement.Placement
	// point is the candidate's point of the front; nil for a baseline.
	point *placement.Point
}

// baselines are the placements of the published algorithms without copies, solved once.
func (s *search) baselines(ctx context.Context) ([]*placement.Placement, error) {
	if s.solvedBaselines != nil {
		return s.solvedBaselines, nil
	}
	plain := *s
	plain.options.Constraints, plain.options.RedundantSlots, plain.options.CopyRule, plain.groups = placement.Constraints{}, 0, placement.NearestCopy, 1
	plain.options.Progress = nil
	for _, by := range timedBaselines {
		result, err := plain.place(ctx, by, time.Time{})
		if err != nil {
			return nil, err
		}
		s.solvedBaselines = append(s.solvedBaselines, result.Placement)
	}
	return s.solvedBaselines, nil
}

// uncopied are the candidates without copies of experts, solved once.
type uncopied struct {
	candidates []timedCandidate
	truncated  bool
}

// withoutCopies solves by time without copies.
func (s *search) withoutCopies(ctx context.Context, deadline time.Time) (*uncopied, error) {
	if s.solvedWithoutCopies != nil {
		return s.solvedWithoutCopies, nil
	}
	if _, err := s.baselines(ctx); err != nil {
		return nil, err
	}
	plain := *s
	plain.options.RedundantSlots, plain.options.CopyRule = 0, placement.NearestCopy
	candidates, result, err := plain.candidates(ctx, deadline)
	if err != nil {
		return nil, err
	}
	s.solvedWithoutCopies = &uncopied{candidates, result.Truncated}
	return s.solvedWithoutCopies, nil
}

// candidates solves by time, and returns the front followed by the baselines. The first candidate is the default placement. With copies of experts, the
// candidates without copies follow, to each of which every rank adds the experts of the highest load that it does not hold: which experts these are is
// surer than which ones the tokens of a rank activate most.
func (s *search) candidates(ctx context.Context, deadline time.Time) ([]timedCandidate, *placement.Result, error) {
	plain, err := s.place(ctx, placement.ContiguousAlgorithm, time.Time{})
	if err != nil {
		return nil, nil, err
	}
	found := []timedCandidate{{string(placement.ContiguousAlgorithm), placement.ContiguousAlgorithm, plain.Placement, nil}}
	result, err := s.place(ctx, placement.Auto, deadline)
	if err != nil {
		return nil, nil, err
	}
	for i := range result.Front {
		point := &result.Front[i]
		found = append(found, timedCandidate{point.Name, placement.Auto, point.Placement, point})
	}
	if s.options.Constraints.Any() || s.groups > 1 {
		return found, &result, nil // baselines know no constraints: they are starts only
	}
	if s.options.RedundantSlots == 0 {
		for i, by := range timedBaselines {
			found = append(found, timedCandidate{string(by), by, s.solvedBaselines[i], nil})
		}
		return found, &result, nil
	}
	copies, err := s.place(ctx, placement.EPLB, time.Time{})
	if err != nil {
		return nil, nil, err
	}
	found = append(found, timedCandidate{string(placement.EPLB), placement.EPLB, copies.Placement, nil})
	without, err := s.withoutCopies(ctx, deadline)
	if err != nil {
		return nil, nil, err
	}
	result.Truncated = result.Truncated || without.truncated
	problem := s.problem(placement.Auto, deadline)
	for _, c := range without.candidates[1:] { // the default placement has hottest copies above
		found = append(found, timedCandidate{c.name + hottestSuffix, placement.Auto, problem.WithHottestCopies(c.placement), nil})
	}
	return found, &result, nil
}

// hottestSuffix ends the names of candidates without copies to which the experts of the highest load are added.
const hottestSuffix = "-hottest"

// runTimed solves by time. The candidates are judged on held-out documents of the train requests, so that the test requests judge a plan that was not
// chosen by them; the candidate of the winner's name, solved from all train requests, becomes the plan.
func (s *search) runTimed(ctx context.Context, deadline time.Time) (*Solution, error) {
	if s.options.RedundantMemory > 0 {
		return s.runSized(ctx, deadline)
	}
	name, truncated, err := s.fastest(ctx, deadline)
	if err != nil {
		return nil, err
	}
	return s.runNamed(ctx, name, truncated, deadline)
}

// runNamed solves by time from all train requests. The candidate of a name becomes the plan.
func (s *search) runNamed(ctx context.Context, name string, truncated bool, deadline time.Time) (*Solution, error) {
	candidates, result, err := s.candidates(ctx, deadline)
	if err != nil {
		return nil, err
	}
	chosen := candidates[slices.IndexFunc(candidates, func(c timedCandidate) bool { return c.name == name })]
	solution := s.solution(result)
	solution.Truncated = solution.Truncated || truncated
	bought := s.options.RedundantMemory > 0 && s.options.RedundantSlots > 0 // copies that pay, be it in the default placement
	if chosen.algorithm == placement.ContiguousAlgorithm && !bought {
		solution.FallBack = "no gain expected: on held-out documents of the profile no placement makes a layer faster than the default one"
		if s.options.Constraints.Moves() {
			chosen.algorithm = placement.Auto // it is the placement in service
		}
	}
	candidates = slices.DeleteFunc(candidates, func(c timedCandidate) bool {
		return c.point == nil && c.name != chosen.name && c.algorithm != placement.ContiguousAlgorithm
	})
	figures, err := s.modelled(ctx, candidates)
	if err != nil {
		return nil, err
	}
	taken := *result
	taken.Placement = chosen.placement
	// The plan is made last: its tables can be most of the memory of a solve.
	if err := s.finish(ctx, solution, &taken, chosen.algorithm); err != nil {
		return nil, err
	}
	solution.Plan.Chosen = chosen.name
	for i := range figures {
		solution.Plan.Front = append(solution.Plan.Front, figures[i].point(&candidates[i], s.options.batchTokens()))
	}
	return solution, nil
}

// FrontPoint is a placement that a solve by time chose among, scored on the test requests.
type FrontPoint struct {
	// Name identifies the point; ExpertLoadLimit is the limit on the load of a rank's experts on the profile in percent of the mean, 0 is none.
	Name            string  `json:"name"`
	ExpertLoadLimit float64 `json:"expert_load_limit"`
	// LAR is the local activation rate, ExpertImbalance that of windows or batches, LayerUS the modelled time of a layer by batch size.
	LAR             float64            `json:"lar"`
	ExpertImbalance float64            `json:"expert_imbalance"`
	LayerUS         map[string]float64 `json:"layer_us"`
}

// Microseconds is the mean modelled time over the batch sizes.
func (p *FrontPoint) Microseconds() float64 {
	sum := 0.0
	for _, us := range p.LayerUS {
		sum += us / float64(len(p.LayerUS))
	}
	return sum
}

// modelledTimes are figures of one candidate on the test requests: means over batch sizes, and the times at each.
type modelledTimes struct {
	lar, imbalance, mean float64
	at                   []float64
}

func (m *modelledTimes) point(c *timedCandidate, sizes []int) FrontPoint {
	round := func(v, places float64) float64 { return math.Round(v*places) / places }
	p := FrontPoint{Name: c.name, LAR: round(m.lar, 1e4), ExpertImbalance: round(m.imbalance, 1e4), LayerUS: map[string]float64{}}
	if c.point != nil {
		p.ExpertLoadLimit = c.point.ExpertLoadLimit
	}
	for i, tokens := range sizes {
		p.LayerUS[strconv.Itoa(tokens)] = round(m.at[i], 100)
	}
	return p
}

const (
	// rankOrders is the number of arrival orders in which candidates are judged.
	rankOrders = 2
	// leastLead is by how much of the default placement's time another candidate must be ahead of the search's own where there is one split, which does
	// not show what chance makes; with several splits it is half of that at least.
	leastLead = 0.005
)

// rankFolds is the number of splits of the train requests by which candidates are judged: small profiles need more, and large ones take longer.
func (s *search) rankFolds() int {
	const small = 8e6
	activations := float64(s.trace.TokenCount(s.train) * len(s.trace.Model.Layers) * s.trace.Model.TopK)
	return min(4, max(1, int(small/max(activations, 1))))
}

// fastest is the name of the candidate to choose. That is the search's own placement of the least time, unless another is ahead of it by more than
// two standard errors over the splits; and the default placement, where that is not slower. The search's own is chosen, too, where the profile cannot be
// split, or the time budget is spent.
func (s *search) fastest(ctx context.Context, deadline time.Time) (name string, truncated bool, err error) {
	trials, truncated, err := s.judge(ctx, []int{s.options.RedundantSlots}, deadline)
	switch {
	case err != nil || truncated:
		return placement.PointOfTime, truncated, err
	case trials == nil:
		return string(placement.ContiguousAlgorithm), false, nil // one document proves nothing
	}
	return trials[0].fastest(), false, nil
}

// trial is the candidates with a number of redundant slots, scored on held-out documents of the train requests.
type trial struct {
	slots int
	// names are those of the candidates, the first is that of the default placement; figures are those of each candidate in every split.
	names   []string
	figures map[string][]modelledTimes
}

// times are the modelled times of a candidate in every split.
func (t *trial) times(name string) []float64 {
	times := make([]float64, len(t.figures[name]))
	for i := range times {
		times[i] = t.figures[name][i].mean
	}
	return times
}

func (t *trial) fastest() string {
	times := map[string][]float64{}
	for _, name := range t.names {
		times[name] = t.times(name)
	}
	return fastestOf(t.names, times)
}

// judge scores the candidates with each of some numbers of redundant slots in every split. There are no trials where the train requests have one
// document. Where the time budget cuts the search off, trials has the numbers that were scored in the first split, or in all splits before.
func (s *search) judge(ctx context.Context, slots []int, deadline time.Time) (trials []trial, truncated bool, err error) {
	progress, folds := s.progress("Copies"), s.rankFolds()
	for fold := range folds {
		part := &search{trace: s.trace.Subset(s.train), options: s.options, groups: s.groups, unused: s.unused}
		part.options.Embeddings, part.options.Progress, part.options.Forecast = nil, nil, Table
		if part.train, part.test, err = trace.Split(part.trace, validationPercent, s.options.Seed+uint64(fold)); err != nil {
			return nil, false, nil
		}
		if err := part.count(ctx); err != nil {
			return nil, false, err
		}
		var scored []trial
		for i, n := range slots {
			part.options.copies(n, s.options.CopyRule)
			candidates, result, err := part.candidates(ctx, deadline)
			if err != nil {
				return nil, false, err
			}
			if truncated = result.Truncated; truncated {
				break
			}
			t := trial{slots: n, figures: map[string][]modelledTimes{}}
			figures, err := part.modelled(ctx, candidates)
			if err != nil {
				return nil, false, err
			}
			s.unused = part.unused
			for at, c := range candidates {
				t.names = append(t.names, c.name)
				t.figures[c.name] = []modelledTimes{figures[at]}
			}
			scored = append(scored, t)
			if progress != nil && len(slots) > 1 {
				progress(fold*len(slots)+i+1, folds*len(slots))
			}
		}
		if fold == 0 {
			trials = scored
		}
		if truncated {
			return trials, true, nil
		}
		for i := range scored {
			for name, figures := range scored[i].figures {
				if fold > 0 {
					trials[i].figures[name] = append(trials[i].figures[name], figures...)
				}
			}
		}
	}
	return trials, false, nil
}

// fastestOf is the name to choose, given the times of each candidate in every split. The first name is that of the default placement.
func fastestOf(names []string, times map[string][]float64) string {
	plain, own := times[names[0]], times[placement.PointOfTime]
	ahead := func(of []float64) (mean, deviation float64) { return leadOf(of, own, plain) }
	best, lead := placement.PointOfTime, 0.0
	for _, name := range names[1:] {
		if mean, deviation := ahead(times[name]); mean-deviation > lead {
			best, lead = name, mean-deviation
		}
	}
	leadOfBest, _ := ahead(times[best])
	if mean, _ := ahead(plain); mean >= leadOfBest {
		return names[0]
	}
	return best
}

// leadOf is by how much of the default placement's time a candidate is ahead of another one in the mean over splits, and how far chance may move that:
// two standard errors, or what one split cannot show.
func leadOf(of, other, plain []float64) (mean, deviation float64) {
	squares, n := 0.0, float64(len(of))
	for i, us := range of {
		lead := (other[i] - us) / plain[i]
		mean += lead / n
		squares += lead * lead
	}
	if n == 1 {
		return mean, leastLead
	}
	return mean, max(leastLead/2, 2*math.Sqrt(max(0, squares-n*mean*mean)/(n*(n-1))))
}

// modelled are the figures of candidates on the test requests.
func (s *search) modelled(ctx context.Context, candidates []timedCandidate) ([]modelledTimes, error) {
	figures := make([]modelledTimes, len(candidates))
	for i := range candidates {
		c := &candidates[i]
		same := slices.IndexFunc(candidates[:i], func(other timedCandidate) bool {
			return slices.EqualFunc(c.placement.Layers, other.placement.Layers, func(a, b placement.Layer) bool { return slices.Equal(a.Slots, b.Slots) })
		})
		if same >= 0 {
			figures[i] = figures[same]
			continue
		}
		plan, err := s.plan(ctx, c.placement, c.algorithm)
		if err != nil {
			return nil, err
		}
		if figures[i], err = s.modelledTimes(ctx, plan); err != nil {
			return nil, err
		}
		s.unused = plan.Tokens
	}
	return figures, nil
}

func (s *search) modelledTimes(ctx context.Context, plan *Plan) (m modelledTimes, err error) {
	o, sizes := s.evaluation(), s.options.batchTokens()
	o.Orders = rankOrders
	layer, weight := s.options.layer(&s.trace.Model, plan.Placement.SlotsPerRank), 1/float64(len(sizes))
	var report cost.Report
	for i, tokens := range sizes {
		o.BatchTokens = tokens
		if i == 0 || s.options.Attention == placement.TensorParallel && tokens != sizes[i-1] { // with attention DP requests have ranks, whatever the size of a batch
			if report, err = s.evaluate(ctx, plan, o); err != nil {
				return m, err
			}
		}
		us := layer.TimeOf(tokens, &report).Total()
		m.at = append(m.at, us)
		m.mean += weight * us
		m.lar = min(1, m.lar+weight*report.LAR)
		m.imbalance += weight * report.ExpertWindowImbalance
	}
	return m, nil
}
