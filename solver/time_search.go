// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"
	"errors"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// timedBaselines are the published algorithms whose placements are candidates and starting points of a search by time.
// Other algorithms are slow, or were never faster in measurements.
var timedBaselines = []placement.Algorithm{placement.EPLB, placement.MoETuner, placement.ExFlow, placement.KMeans2D}

// clusteredRows is the number of token IDs × layers × ranks up to which KMeans2D clusters all token IDs.
const (
	clusteredRows    = 1 << 22
	minClusteredRows = 1 << 11
)

// timedCandidate is a placement among which a search by time chooses.
type timedCandidate struct {
	name      string
	algorithm placement.Algorithm
	placement *placement.Placement
	// point is the candidate's point on the Pareto front; nil for a baseline.
	point *placement.Point
}

// baselines returns the placements of the published algorithms without copies, in the order of timedBaselines; after the
// deadline, only the first ones. They are solved once.
func (s *search) baselines(ctx context.Context, deadline time.Time) ([]*placement.Placement, error) {
	if s.solvedBaselines != nil {
		return s.solvedBaselines, nil
	}
	plain := *s
	plain.options.Constraints, plain.options.RedundantSlots, plain.options.CopyRule, plain.groups = placement.Constraints{}, 0, placement.NearestCopy, 1
	plain.options.Progress = nil
	for _, by := range timedBaselines {
		if !deadline.IsZero() && time.Now().After(deadline) {
			break
		}
		problem := plain.problem(by, deadline)
		problem.MaxRows = max(minClusteredRows, clusteredRows/(len(problem.Layers)*problem.Ranks))
		result, err := placement.Solve(ctx, problem)
		if err != nil {
			return nil, err
		}
		s.solvedBaselines = append(s.solvedBaselines, result.Placement)
	}
	return s.solvedBaselines, nil
}

// uncopied are the candidates without copies of experts. They are solved once.
type uncopied struct {
	candidates []timedCandidate
	truncated  bool
}

// withoutCopies solves by time without copies.
func (s *search) withoutCopies(ctx context.Context, deadline time.Time) (*uncopied, error) {
	if s.solvedWithoutCopies != nil {
		return s.solvedWithoutCopies, nil
	}
	if _, err := s.baselines(ctx, deadline); err != nil {
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

// candidates solves by time, and returns the front followed by the baselines. The first candidate is the default
// placement. With copies of experts, the candidates without copies follow, with each rank extended by the experts of
// the highest load that it does not contain. The load of experts is easier to predict than which experts the tokens of
// a rank activate most.
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
		return found, &result, nil // baselines ignore constraints, so they only serve as starting points
	}
	if s.options.RedundantSlots == 0 {
		for i, solved := range s.solvedBaselines {
			found = append(found, timedCandidate{string(timedBaselines[i]), timedBaselines[i], solved, nil})
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
	for _, c := range without.candidates[1:] { // the default placement with copies of the hottest experts is above
		found = append(found, timedCandidate{c.name + hottestSuffix, placement.Auto, problem.WithHottestCopies(c.placement), nil})
	}
	return found, &result, nil
}

// hottestSuffix is the name suffix of candidates without copies that are extended by the experts of the highest load.
const hottestSuffix = "-hottest"

// runTimed solves by time. Candidates are compared on held-out documents of the train requests, so that the choice is
// independent of the test requests. The plan is the candidate with the winner's name, solved from all train requests.
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

// runNamed solves by time from all train requests, and makes the named candidate the plan.
func (s *search) runNamed(ctx context.Context, name string, truncated bool, deadline time.Time) (*Solution, error) {
	candidates, result, err := s.candidates(ctx, deadline)
	if err != nil {
		return nil, err
	}
	named := func(name string) int {
		return slices.IndexFunc(candidates, func(c timedCandidate) bool { return c.name == name })
	}
	at := named(name)
	if at < 0 {
		at = named(placement.PointOfTime) // the time budget did not suffice for the candidate
	}
	chosen := candidates[at]
	solution := s.solution(result)
	solution.Truncated = solution.Truncated || truncated
	bought := s.options.RedundantMemory > 0 && s.options.RedundantSlots > 0 // copies that pay, even in the default placement
	if chosen.algorithm == placement.ContiguousAlgorithm && !bought {
		solution.FallBack = "no gain expected: on held-out documents of the profile no placement makes a layer at least 0.5% faster than the default one"
		if s.options.Constraints.Moves() {
			chosen.algorithm = placement.Auto // it is the placement in service
		}
	}
	candidates = slices.DeleteFunc(candidates, func(c timedCandidate) bool {
		return c.point == nil && c.name != chosen.name && c.algorithm != placement.ContiguousAlgorithm
	})
	if err := s.tryNeighbours(ctx, solution, chosen.placement, chosen.algorithm); err != nil {
		return nil, err
	}
	figures, err := s.modelled(ctx, candidates)
	if err != nil {
		return nil, err
	}
	taken := *result
	taken.Placement = chosen.placement
	// The plan is built last, because its tables can use most of the memory of a solve.
	if err := s.finish(ctx, solution, &taken, chosen.algorithm, deadline); err != nil {
		return nil, err
	}
	solution.Plan.Chosen = chosen.name
	for i := range figures {
		solution.Plan.Front = append(solution.Plan.Front, figures[i].point(&candidates[i], s.options.batchTokens()))
	}
	return solution, nil
}

// FrontPoint is a candidate of a search by time, scored on a sample of the test requests.
type FrontPoint struct {
	// Name identifies the point. ExpertLoadLimit is the limit on the load of a rank's experts on the profile, in
	// percent of the mean; 0 means none.
	Name            string  `json:"name"`
	ExpertLoadLimit float64 `json:"expert_load_limit"`
	// LAR is the local activation rate, ExpertImbalance the imbalance of windows or batches, LayerUS the modelled time
	// of a layer in microseconds by batch size.
	LAR             float64            `json:"lar"`
	ExpertImbalance float64            `json:"expert_imbalance"`
	LayerUS         map[string]float64 `json:"layer_us"`
}

// Microseconds returns the mean modelled time over the batch sizes.
func (p *FrontPoint) Microseconds() float64 {
	sum := 0.0
	for _, us := range p.LayerUS {
		sum += us / float64(len(p.LayerUS))
	}
	return sum
}

// modelledTimes are the scores of one candidate on a sample of the test requests: means over batch sizes, and the time
// at each size.
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
	// rankOrders is the number of arrival orders in which candidates are scored.
	rankOrders = 2
	// minMargin is the minimum margin of any candidate over the default placement, as a fraction of its time: less is
	// not worth other experts on a rank. It is also the minimum margin of another candidate over the search's own with a
	// single split, which cannot show the variance. With several splits that minimum is half of minMargin.
	minMargin = 0.005
)

// rankFolds returns the number of splits of the train requests for comparing candidates. Small profiles need more
// splits, and large ones take longer.
func (s *search) rankFolds() int {
	const small = 8e6
	activations := float64(s.trace.TokenCount(s.train) * len(s.trace.Model.Layers) * s.trace.Model.TopK)
	return min(4, max(1, int(small/max(activations, 1))))
}

// fastest returns the name of the candidate to choose: the search's own placement with the minimum time, unless another
// candidate is faster by more than two standard errors over the splits. It returns the default placement if the other one
// is not faster by minMargin, or if the profile cannot be split, and the search's own placement if the time budget does
// not suffice for one split.
func (s *search) fastest(ctx context.Context, deadline time.Time) (name string, truncated bool, err error) {
	trials, truncated, err := s.scoreCandidates(ctx, []int{s.options.RedundantSlots}, halfway(deadline))
	switch {
	case err != nil:
		return "", false, err
	case trials != nil:
		return trials[0].fastest(), truncated, nil
	case truncated:
		return placement.PointOfTime, true, nil
	}
	return string(placement.ContiguousAlgorithm), false, nil // one document is no evidence
}

// halfway returns the time until which candidates are compared, if the search has to end at the deadline: half of the
// remaining time. The other half is for the search from all train requests.
func halfway(deadline time.Time) time.Time {
	if deadline.IsZero() {
		return deadline
	}
	return time.Now().Add(time.Until(deadline) / 2)
}

// trial contains the candidates with one number of redundant slots, scored on held-out documents of the train requests.
type trial struct {
	slots int
	// names are the names of the candidates; the first one is the default placement. figures are the scores of each
	// candidate in every split.
	names   []string
	figures map[string][]modelledTimes
}

// times returns the modelled times of a candidate in every split.
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

// scoreCandidates scores the candidates with each number of redundant slots in every split. It returns no trials if the
// train requests have only one document. If the time budget cuts the search off, trials contains the numbers scored in
// the first split, or in all completed splits.
func (s *search) scoreCandidates(ctx context.Context, slots []int, deadline time.Time) (trials []trial, truncated bool, err error) {
	progress, folds := s.progress("Copies"), s.rankFolds()
	within := ctx
	if !deadline.IsZero() {
		var cancel context.CancelFunc
		within, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	overdue := func(err error) bool { return errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil }
	for fold := range folds {
		part := &search{trace: s.trace.Subset(s.train), options: s.options, groups: s.groups, unused: s.unused}
		if s.scoresPartOfLayers() {
			part.trace = part.trace.WithLayers(sampledLayers(len(part.trace.Model.Layers)))
		}
		part.options.Embeddings, part.options.Progress, part.options.Forecast = nil, nil, Table
		if part.train, part.test, err = trace.Split(part.trace, validationPercent, s.options.Seed+uint64(fold)); err != nil {
			return nil, false, nil
		}
		if err := part.count(within); overdue(err) {
			return trials, true, nil
		} else if err != nil {
			return nil, false, err
		}
		var scored []trial
		for i, n := range slots {
			part.options.copies(n, s.options.CopyRule)
			t, err := part.trial(within, deadline)
			s.unused = part.unused
			if truncated = t == nil && err == nil || overdue(err); truncated {
				break
			}
			if err != nil {
				return nil, false, err
			}
			scored = append(scored, *t)
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

// trial scores the candidates on the test requests. It returns nil if the time budget cuts off the search.
func (s *search) trial(ctx context.Context, deadline time.Time) (*trial, error) {
	candidates, result, err := s.candidates(ctx, deadline)
	if err != nil || result.Truncated {
		return nil, err
	}
	figures, err := s.modelled(ctx, candidates)
	if err != nil {
		return nil, err
	}
	t := &trial{slots: s.options.RedundantSlots, figures: map[string][]modelledTimes{}}
	for i, c := range candidates {
		t.names = append(t.names, c.name)
		t.figures[c.name] = []modelledTimes{figures[i]}
	}
	return t, nil
}

// fastestOf returns the name to choose, given the times of each candidate in every split. The first name is that of the
// default placement.
func fastestOf(names []string, times map[string][]float64) string {
	plain, own := times[names[0]], times[placement.PointOfTime]
	ahead := func(of []float64) (mean, deviation float64) { return marginOf(of, own, plain) }
	best, lead := placement.PointOfTime, 0.0
	for _, name := range names[1:] {
		if mean, deviation := ahead(times[name]); mean-deviation > lead {
			best, lead = name, mean-deviation
		}
	}
	leadOfBest, _ := ahead(times[best])
	if mean, _ := ahead(plain); leadOfBest-mean < minMargin {
		return names[0]
	}
	return best
}

// marginOf returns the mean margin of a candidate over another one, over the splits, as a fraction of the default
// placement's time, and the deviation that chance explains: two standard errors, or minMargin for a single split.
func marginOf(of, other, plain []float64) (mean, deviation float64) {
	squares, n := 0.0, float64(len(of))
	for i, us := range of {
		lead := (other[i] - us) / plain[i]
		mean += lead / n
		squares += lead * lead
	}
	if n == 1 {
		return mean, minMargin
	}
	return mean, max(minMargin/2, 2*math.Sqrt(max(0, squares-n*mean*mean)/(n*(n-1))))
}

// modelled returns the scores of candidates on the test requests.
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

const (
	// sampledTokens is the number of test tokens for scoring a candidate, or a batch, if that is larger. sampledRows is
	// the maximum number of tokens × layers × ranks with attention TP, beyond which fewer tokens are scored, down to
	// minSampledTokens. A token takes 0.3 µs per layer to assign with 8 ranks, and 2 µs with 32.
	sampledTokens    = 1 << 16
	minSampledTokens = 1 << 14
	sampledRows      = 1 << 23
	maxSampledLayers = 16
	// sampledRowsOfRequests is the number of tokens × layers with attention DP, which takes a tenth of the time.
	sampledRowsOfRequests = 1 << 22
)

// sampledLayers returns the indices of at most maxSampledLayers of the given number of layers, at equal distances.
func sampledLayers(all int) []int {
	layers := make([]int, min(all, maxSampledLayers))
	for i := range layers {
		layers[i] = i * all / len(layers)
	}
	return layers
}

// scoresPartOfLayers reports whether candidates are solved and scored for a sample of the layers only. With attention
// TP the layers of a placement are independent, but pins and the placement in service name all of them.
func (s *search) scoresPartOfLayers() bool {
	return s.options.Attention == placement.TensorParallel && len(s.trace.Model.Layers) > maxSampledLayers &&
		s.options.Current == nil && len(s.options.Constraints.Pins) == 0
}

// sample returns the test requests and layers for scoring candidates in batches of a size. All candidates are scored on
// the same ones.
func (s *search) sample(batchTokens int) (requests, layers []int) {
	all := len(s.trace.Model.Layers)
	if s.options.Attention == placement.DataParallel {
		return trace.Sample(s.trace, s.test, max(sampledTokens, sampledRowsOfRequests/all), s.options.Seed), nil
	}
	layers = sampledLayers(all)
	tokens := min(max(sampledTokens, batchTokens), max(minSampledTokens, sampledRows/(len(layers)*max(s.options.Ranks, 16))))
	requests = trace.Sample(s.trace, s.test, tokens, s.options.Seed)
	return requests, layers
}

// modelledTimes returns the scores of a plan on a sample of the test requests.
func (s *search) modelledTimes(ctx context.Context, plan *Plan) (m modelledTimes, err error) {
	o, sizes := s.evaluation(), s.options.batchTokens()
	o.Orders = rankOrders
	layer, weight := s.options.layer(&s.trace.Model, plan.Placement.SlotsPerRank), 1/float64(len(sizes))
	var report cost.Report
	for i, tokens := range sizes {
		o.BatchTokens = tokens
		o.Requests, o.Layers = s.sample(tokens)
		if i == 0 || s.options.Attention == placement.TensorParallel && tokens != sizes[i-1] { // with attention DP, ranks of requests do not depend on the batch size
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
