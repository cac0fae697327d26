// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
)

// StageTimes contains the measured times of the tasks of schedules on one attention rank and one expert rank, in
// microseconds. They replace a hardware profile where the machines can be measured with the model's own kernels.
type StageTimes struct {
	Format string `json:"format"`
	Model  Shape  `json:"model"`
	// Attention and Shared are tasks of a micro-batch of whole samples. Shared is empty without shared experts.
	Attention []MeasuredSamples `json:"attention"`
	Shared    []MeasuredSamples `json:"shared"`
	// Experts is the task of a chunk on the expert rank. Dispatch and Combine are its exchanges.
	Experts  []MeasuredExperts  `json:"experts"`
	Dispatch []MeasuredTransfer `json:"dispatch"`
	Combine  []MeasuredTransfer `json:"combine"`
}

// MeasuredSamples is the time of a task for a number of samples of Sequence tokens.
type MeasuredSamples struct {
	Samples      int     `json:"samples"`
	Sequence     int     `json:"sequence"`
	Microseconds float64 `json:"us"`
}

// MeasuredExperts is the time of all experts with a mean number of tokens for each.
type MeasuredExperts struct {
	TokensPerExpert float64 `json:"tokens_per_expert"`
	Microseconds    float64 `json:"us"`
}

// MeasuredTransfer is the time of sending a number of bytes.
type MeasuredTransfer struct {
	Bytes        float64 `json:"bytes"`
	Microseconds float64 `json:"us"`
}

const (
	stageTimesFormat = "semmoe.io/pipeline-stages/v1"
	// minStagePoints is the minimum number of measurements of a task: fewer determine no start-up time and rate with a
	// check of both.
	minStagePoints = 3
	// maxStagePoints bounds the work of a request for a schedule.
	maxStagePoints = 4096
)

// ParseStageTimes reads measured stage times from JSON. It ignores unknown members, and returns an error for missing or
// impossible measurements.
func ParseStageTimes(text []byte) (*StageTimes, error) {
	s := &StageTimes{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, err
	}
	if s.Format != stageTimesFormat {
		return nil, fmt.Errorf("format: %q is invalid: must be %q", s.Format, stageTimesFormat)
	}
	if err := s.Model.Check(); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if (len(s.Shared) > 0) != (s.Model.SharedSize > 0) {
		return nil, fmt.Errorf("shared: there are %d measurements, and the shared experts of the model have width %d", len(s.Shared), s.Model.SharedSize)
	}
	for _, task := range []struct {
		name   string
		points [][2]float64
	}{
		{"attention", samplePoints(s.Attention)}, {"shared", samplePoints(s.Shared)}, {"experts", expertPoints(s.Experts)},
		{"dispatch", transferPoints(s.Dispatch)}, {"combine", transferPoints(s.Combine)},
	} {
		if task.name == "shared" && len(task.points) == 0 {
			continue
		}
		if n := len(task.points); n < minStagePoints || n > maxStagePoints {
			return nil, fmt.Errorf("%s: there are %d measurements; allowed are %d to %d", task.name, n, minStagePoints, maxStagePoints)
		}
		for i, p := range task.points {
			if !(p[0] > 0) || !(p[1] > 0) || math.IsInf(p[0], 0) || math.IsInf(p[1], 0) {
				return nil, fmt.Errorf("%s[%d]: size %v, %v µs; both must be above 0 and finite", task.name, i, p[0], p[1])
			}
		}
	}
	return s, nil
}

// samplePoints returns the number of tokens and the time of each measurement. The number is 0 if a factor is invalid.
func samplePoints(list []MeasuredSamples) [][2]float64 {
	points := make([][2]float64, len(list))
	for i, m := range list {
		points[i] = [2]float64{float64(max(m.Samples, 0)) * float64(max(m.Sequence, 0)), m.Microseconds}
	}
	return points
}

func expertPoints(list []MeasuredExperts) [][2]float64 {
	points := make([][2]float64, len(list))
	for i, m := range list {
		points[i] = [2]float64{m.TokensPerExpert, m.Microseconds}
	}
	return points
}

func transferPoints(list []MeasuredTransfer) [][2]float64 {
	points := make([][2]float64, len(list))
	for i, m := range list {
		points[i] = [2]float64{m.Bytes, m.Microseconds}
	}
	return points
}

// Problem returns the schedule problem for at most the given number of samples of a length. MicroBatches of 0 means
// DefaultMicroBatches.
func (s *StageTimes) Problem(sequence, samples, microBatches int) (*Problem, error) {
	split := Split{AttentionRanks: 1, ExpertRanks: 1, Samples: samples, Attention: s.attention(sequence)}
	if len(s.Shared) > 0 {
		shared := convexFit(samplePoints(s.Shared))
		split.Shared = func(samples float64) float64 { return shared.at(samples * float64(sequence)) }
	}
	split.Experts = convexFit(expertPoints(s.Experts)).at
	row := float64(s.Model.Experts) * float64(s.Model.Hidden) * bf16
	for _, way := range []struct {
		into   *Ways
		points []MeasuredTransfer
	}{{&split.Dispatch, s.Dispatch}, {&split.Combine, s.Combine}} {
		hull := convexFit(transferPoints(way.points))
		*way.into = Ways{func(tokens float64) float64 { return hull.at(tokens * row) }}
	}
	p := &Problem{
		Layers: s.Model.MoELayers, Experts: s.Model.Experts, TopK: s.Model.TopK, Sequence: sequence, MicroBatches: microBatches, Splits: []Split{split},
	}
	return p, p.Check()
}

// attention returns the time of attention for samples of the given length, as a function of their number. The model is
// a start-up time, a time for each token (projections, gate, gathering rows), and a time for each pair of a query and a
// key; FinDEP, section 4.
func (s *StageTimes) attention(sequence int) func(samples float64) float64 {
	work := func(samples, sequence float64) [attentionTerms]float64 {
		return [attentionTerms]float64{1, samples * sequence, samples * sequence * sequence}
	}
	rows := make([][attentionTerms]float64, len(s.Attention))
	us := make([]float64, len(s.Attention))
	for i, m := range s.Attention {
		rows[i], us[i] = work(float64(m.Samples), float64(m.Sequence)), m.Microseconds
	}
	times := leastNonNegative(rows, us)
	return func(samples float64) float64 {
		sum := 0.0
		for i, w := range work(samples, float64(sequence)) {
			sum += times[i] * w
		}
		return sum
	}
}

const attentionTerms = 3

// leastNonNegative returns the non-negative coefficients with the smallest sum of squared relative errors. It solves
// the normal equations of every subset of the terms, of which the best non-negative solution is the optimum.
func leastNonNegative(rows [][attentionTerms]float64, us []float64) [attentionTerms]float64 {
	var best [attentionTerms]float64
	least := math.Inf(1)
	for subset := 1; subset < 1<<attentionTerms; subset++ {
		times, ok := solveSubset(rows, us, subset)
		if !ok {
			continue
		}
		squares := 0.0
		for i, row := range rows {
			sum := 0.0
			for j := range row {
				sum += times[j] * row[j]
			}
			squares += (sum/us[i] - 1) * (sum/us[i] - 1)
		}
		if squares < least {
			best, least = times, squares
		}
	}
	return best
}

// solveSubset solves the normal equations of the terms in the subset by Gaussian elimination with scaled columns. It
// returns false if they have no unique solution without negative coefficients.
func solveSubset(rows [][attentionTerms]float64, us []float64, subset int) (times [attentionTerms]float64, ok bool) {
	const singular = 1e-10
	var equations [attentionTerms][attentionTerms + 1]float64
	var scale [attentionTerms]float64
	for i, row := range rows {
		for j := range row {
			scale[j] = max(scale[j], row[j]/us[i])
		}
	}
	for i, row := range rows {
		for j := range row {
			for k := range row {
				equations[j][k] += row[j] / us[i] / scale[j] * row[k] / us[i] / scale[k]
			}
			equations[j][attentionTerms] += row[j] / us[i] / scale[j]
		}
	}
	var terms []int
	for j := range attentionTerms {
		if subset>>j&1 == 1 {
			terms = append(terms, j)
		}
	}
	for n, j := range terms {
		pivot := slices.MaxFunc(terms[n:], func(a, b int) int { return cmp.Compare(math.Abs(equations[a][j]), math.Abs(equations[b][j])) })
		equations[j], equations[pivot] = equations[pivot], equations[j]
		if math.Abs(equations[j][j]) < singular {
			return times, false
		}
		for _, k := range terms {
			if k == j {
				continue
			}
			factor := equations[k][j] / equations[j][j]
			for column := range equations[k] {
				equations[k][column] -= factor * equations[j][column]
			}
		}
	}
	for _, j := range terms {
		times[j] = equations[j][attentionTerms] / equations[j][j] / scale[j]
		if times[j] < 0 {
			return times, false
		}
	}
	return times, true
}

// hull is a convex, non-decreasing, piecewise linear function.
type hull [][2]float64

// convexFit returns the largest convex function below all points, multiplied so that relative errors balance: kernels
// that compute rows in tiles have times that are not convex. Below the first point the function is constant; above the
// last one it continues the last piece.
func convexFit(points [][2]float64) hull {
	h := lowerHull(points)
	logs := 0.0
	for _, p := range points {
		logs += math.Log(p[1]/h.at(p[0])) / float64(len(points))
	}
	for i := range h {
		h[i][1] *= math.Exp(logs)
	}
	return h
}

// lowerHull returns the largest convex, non-decreasing function below all points.
func lowerHull(points [][2]float64) hull {
	sorted := slices.Clone(points)
	slices.SortFunc(sorted, func(a, b [2]float64) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) })
	var h hull
	for _, p := range sorted {
		if len(h) > 0 && h[len(h)-1][0] == p[0] {
			continue
		}
		for len(h) > 1 && slope(h[len(h)-2], h[len(h)-1]) >= slope(h[len(h)-2], p) {
			h = h[:len(h)-1]
		}
		if len(h) == 1 && p[1] < h[0][1] {
			h[0][1] = p[1] // a smaller task takes no longer
		}
		h = append(h, p)
	}
	return h
}

func slope(a, b [2]float64) float64 { return (b[1] - a[1]) / (b[0] - a[0]) }

func (h hull) at(x float64) float64 {
	if len(h) == 1 || x <= h[0][0] {
		return h[0][1]
	}
	i, _ := slices.BinarySearchFunc(h, x, func(p [2]float64, x float64) int { return cmp.Compare(p[0], x) })
	i = min(max(i, 1), len(h)-1)
	return h[i][1] + slope(h[i-1], h[i])*(x-h[i][0])
}
