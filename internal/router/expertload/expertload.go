// SPDX-License-Identifier: Apache-2.0

package expertload

import (
	"cmp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
)

const (
	// DefaultSeries is the default number of experts at either end of the ranking that have their own series. MaxSeries
	// is the maximum.
	DefaultSeries, MaxSeries = 5, 50
	// period is the length of a bucket. Loads are the sums of the current and the previous bucket.
	period = 5 * time.Minute
	// minMean is the minimum mean number of activations per expert for which a layer is reported. At this mean, the
	// load of an expert has a standard error of 10% under random routing.
	minMean = 100
	// maxExperts is the maximum number of experts of all layers of a counted model, at 16 bytes each. Current models
	// have some ten thousand.
	maxExperts = 1 << 18
)

// bounds are the upper bounds of the histogram's buckets: 1 is the mean.
var bounds = []float64{0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5, 10}

const window = " for requests sampled in the last 5 to 10 minutes"

var (
	ratioMetric = prometheus.NewDesc("semmoe_expert_load_ratio",
		"Distribution, over the experts of all MoE layers, of their activations divided by the mean of the layer,"+window+". A snapshot: use its buckets without rate.", nil, nil)
	extremeMetric = prometheus.NewDesc("semmoe_extreme_expert_load_ratio",
		"Activations divided by the mean of the layer, for the experts with the highest and the lowest ratio in all MoE layers (--expert-load-series of each),"+window+".",
		[]string{"layer", "expert", "extreme"}, nil)
	imbalanceMetric = prometheus.NewDesc("semmoe_layer_group_expert_imbalance_ratio",
		"Activations of the most used expert of a layer divided by the mean of its experts, as the mean over a group of consecutive MoE layers (group 0 has the first layers),"+window+".",
		[]string{"group"}, nil)
)

// Window counts the activations of each expert, of one model at a time. It is a prometheus.Collector, and safe for
// concurrent use.
type Window struct {
	series int
	now    func() time.Time

	mu sync.Mutex
	// model and shape describe the counted model. last is the time of its latest activations.
	model string
	shape lar.Shape
	last  time.Time
	// current is the bucket that began at began, previous the bucket before: [MoE layer][expert] in one slice. Both are
	// nil before the first request.
	current, previous []int64
	began             time.Time
}

// New returns a window that reports series experts at either end of the ranking.
func New(series int) *Window { return &Window{series: min(max(series, 0), MaxSeries), now: time.Now} }

// NewCounts returns counts for the experts of a model, for lar.CountActivations; nil if the model has too many experts.
func NewCounts(shape lar.Shape) []int64 {
	size := len(shape.MoELayers) * shape.Experts
	if size > maxExperts {
		return nil
	}
	return make([]int64, size)
}

// Add adds the counts of a request; counts may be nil. While two models serve, for example during a rollout, the window
// keeps the model that was counted first until none of its requests was sampled for one period.
func (w *Window) Add(model string, shape lar.Shape, counts []int64) {
	if counts == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now()
	if w.current == nil || model != w.model || !sameExperts(shape, w.shape) {
		if w.current != nil && now.Sub(w.last) < period {
			return
		}
		w.model, w.shape, w.began, w.current, w.previous = model, shape, now, make([]int64, len(counts)), make([]int64, len(counts))
	}
	w.last = now
	w.roll(now)
	for i, count := range counts {
		w.current[i] += count
	}
}

// sameExperts reports whether two models have the same experts in the same layers.
func sameExperts(a, b lar.Shape) bool {
	return a.Layers == b.Layers && a.Experts == b.Experts && a.ExpertsPerToken == b.ExpertsPerToken && slices.Equal(a.MoELayers, b.MoELayers)
}

// roll starts a new bucket if the current one is complete. The lock must be held.
func (w *Window) roll(now time.Time) {
	age := now.Sub(w.began)
	if age < period {
		return
	}
	w.current, w.previous = w.previous, w.current
	clear(w.current)
	if age >= 2*period {
		clear(w.previous)
	}
	w.began = now
}

// load is an expert with its load.
type load struct {
	layer, expert int
	ratio         float64
}

// loads returns the load of each expert, in ascending order, and the mean of the largest loads for each group of
// layers. Layers with few activations are omitted.
func (w *Window) loads() (all []load, groups map[int]float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		return nil, nil
	}
	w.roll(w.now())
	sums, layers := map[int]float64{}, map[int]float64{}
	for i, layer := range w.shape.MoELayers {
		first := len(all)
		total := int64(0)
		for expert := range w.shape.Experts {
			count := w.current[i*w.shape.Experts+expert] + w.previous[i*w.shape.Experts+expert]
			total += count
			all = append(all, load{layer, expert, float64(count)})
		}
		mean := float64(total) / float64(w.shape.Experts)
		if mean < minMean {
			all = all[:first]
			continue
		}
		highest := 0.0
		for at := range all[first:] {
			all[first+at].ratio /= mean
			highest = max(highest, all[first+at].ratio)
		}
		sums[w.shape.Group(i)] += highest
		layers[w.shape.Group(i)]++
	}
	for group := range sums {
		sums[group] /= layers[group]
	}
	slices.SortStableFunc(all, func(a, b load) int { return cmp.Compare(a.ratio, b.ratio) })
	return all, sums
}

// Describe implements prometheus.Collector.
func (w *Window) Describe(to chan<- *prometheus.Desc) {
	to <- ratioMetric
	to <- extremeMetric
	to <- imbalanceMetric
}

// Collect implements prometheus.Collector.
func (w *Window) Collect(to chan<- prometheus.Metric) {
	all, groups := w.loads()
	if len(all) == 0 {
		return
	}
	buckets, sum := map[float64]uint64{}, 0.0
	for _, bound := range bounds {
		above, _ := slices.BinarySearchFunc(all, bound, func(l load, bound float64) int {
			if l.ratio <= bound {
				return -1
			}
			return 1
		})
		buckets[bound] = uint64(above)
	}
	for _, l := range all {
		sum += l.ratio
	}
	to <- prometheus.MustNewConstHistogram(ratioMetric, uint64(len(all)), sum, buckets)
	for group, value := range groups {
		to <- prometheus.MustNewConstMetric(imbalanceMetric, prometheus.GaugeValue, value, strconv.Itoa(group))
	}
	ends := min(w.series, len(all)/2) // no expert is at both ends
	for extreme, list := range map[string][]load{"lowest": all[:ends], "highest": all[len(all)-ends:]} {
		for _, l := range list {
			to <- prometheus.MustNewConstMetric(extremeMetric, prometheus.GaugeValue, l.ratio, strconv.Itoa(l.layer), strconv.Itoa(l.expert), extreme)
		}
	}
}
