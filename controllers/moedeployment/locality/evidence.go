package locality

import (
	"math"
	"slices"
	"time"

	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/promquery"
	"github.com/semmoe/operator/solver/drift"
)

// RateUnder is the rate of the requests that routers sampled under a layout within a window about now and sent by the tables of a plan, or by
// whichever where none is named: what older tables came to says nothing of what newer ones promise.
func RateUnder(reports []lar.Report, layoutDigest, tables string, now time.Time, window time.Duration) lar.Ratio {
	var rate lar.Ratio
	for _, report := range reports {
		for _, o := range report.Observations {
			if o.Plan == layoutDigest && now.Sub(o.Time).Abs() <= window && (tables == "" || o.Forecast != nil && o.Forecast.Tables == tables) {
				rate.Add(o.Activations)
			}
		}
	}
	return rate
}

// RouterEvidence is what the request routers tell of the requests that they sampled under the plan in service.
type RouterEvidence struct {
	// Answered is how many routers tell anything.
	Answered int
	// Newest is the time of the last sample of the window; zero where there is none.
	Newest time.Time
	// Tables is the full digest of the plan whose tables scored the last of them that was scored, and Samples those that it scored,
	// the oldest first.
	Tables  string
	Samples []TimedSample
	// Calibration is what those are judged by; nil where the plan has none.
	Calibration *drift.Calibration
}

// TimedSample is a sample and when it was taken.
type TimedSample struct {
	Time time.Time
	drift.Sample
}

// EvidenceOf gathers what routers sampled under a layout within a window about now. What is older says nothing of now; what is as
// far ahead was written by a clock that is wrong.
func EvidenceOf(reports []lar.Report, layoutDigest string, now time.Time, window time.Duration) RouterEvidence {
	evidence := RouterEvidence{Answered: len(reports)}
	var recent []lar.Observation
	for _, report := range reports {
		for _, o := range report.Observations {
			if o.Plan == layoutDigest && now.Sub(o.Time).Abs() <= window {
				recent = append(recent, o)
			}
		}
	}
	slices.SortStableFunc(recent, func(a, b lar.Observation) int { return a.Time.Compare(b.Time) })
	for _, o := range recent {
		evidence.Newest = o.Time
		if o.Forecast != nil {
			evidence.Tables = o.Forecast.Tables
		}
	}
	for _, o := range recent {
		if sample, ok := sampleFor(o, evidence.Tables); ok {
			evidence.Samples = append(evidence.Samples, sample)
		}
	}
	return evidence
}

// sampleFor is what an observation says in the test; not ok where it was scored by other tables, or not at all, or tells of no
// activation.
func sampleFor(o lar.Observation, tables string) (sample TimedSample, ok bool) {
	if o.Forecast == nil || o.Forecast.Tables != tables || o.Total <= 0 || o.Local < 0 || o.Local > o.Total {
		return TimedSample{}, false
	}
	return TimedSample{o.Time, drift.Sample{
		Best: o.Forecast.Best, Rank: o.Rank, Highest: o.Forecast.Highest, Predicted: o.Forecast.Predicted,
		Local: float64(o.Local) / float64(o.Total), Known: o.Forecast.Known, Pairs: o.Forecast.Pairs,
	}}, true
}

// clearedAt is the share of its threshold below which the statistic must fall for an alarm to end: one that has just been raised
// would else come and go.
const clearedAt = 0.5

// testSamples runs the sequential test over the samples, the oldest first. It needs no memory of earlier runs: alarm and hysteresis
// are functions of the samples, and whoever reads them comes to the same.
func testSamples(c *drift.Calibration, samples []TimedSample) testResult {
	result := testResult{Tested: true, Threshold: 1}
	var statistic drift.Statistic
	for _, s := range samples {
		statistic = c.Next(statistic, s.Sample)
		result.Statistic = c.Ratio(statistic)
		result.Alarm = c.Drifted(statistic) || result.Alarm && result.Statistic >= clearedAt
	}
	if result.Alarm {
		causes := c.Explain(plain(samples))
		// The causes are of the samples since the onset.
		result.Causes, result.Since = &causes, samples[len(samples)-max(1, causes.Samples)].Time
	}
	return result
}

func plain(samples []TimedSample) []drift.Sample {
	list := make([]drift.Sample, len(samples))
	for i, s := range samples {
		list[i] = s.Sample
	}
	return list
}

const (
	// windowSteps is in how many values a window is asked for.
	windowSteps = 60
	// staleSteps is how many steps old the newest value may be.
	staleSteps = 3
	// leastValues is how many values a window must have: three quarters.
	leastValues = windowSteps * 3 / 4
	// raisedAt is the share of a window's values that must be below the bar for an alarm.
	raisedAt = 0.9
)

// PrometheusEvidence is what Prometheus tells.
type PrometheusEvidence struct {
	// Problem is why it tells nothing.
	Problem desired.Finding
	// Points are the values of at most two windows under the plan in use that are numbers, the oldest first.
	Points []promquery.Point
	Window time.Duration
	// End is the end of the last window.
	End time.Time
}

// step is the time between two values.
func (e PrometheusEvidence) step() time.Duration { return e.Window / windowSteps }

// covered reports whether the last window has enough values.
func (e PrometheusEvidence) covered() bool {
	return len(within(e.Points, e.End, e.Window)) >= leastValues
}

// within are the points of the window that ends at a time.
func within(points []promquery.Point, end time.Time, window time.Duration) []promquery.Point {
	first, _ := slices.BinarySearchFunc(points, end.Add(-window), func(p promquery.Point, t time.Time) int {
		if p.Time.After(t) {
			return 1 // the beginning is the end of the window before
		}
		return -1
	})
	last, _ := slices.BinarySearchFunc(points, end, func(p promquery.Point, t time.Time) int {
		if p.Time.After(t) {
			return 1
		}
		return -1
	})
	return points[first:last]
}

// numbers are the points whose values are numbers, from a time on.
func numbers(points []promquery.Point, from time.Time) []promquery.Point {
	var kept []promquery.Point
	for _, p := range points {
		if !math.IsNaN(p.Value) && !math.IsInf(p.Value, 0) && !p.Time.Before(from) {
			kept = append(kept, p)
		}
	}
	return kept
}

// testValues follows the window along the points: an alarm is raised where nearly all of its values are below the bar, and ends where
// fewer than half are. Two windows of points make that a function of the points alone.
func testValues(points []promquery.Point, window time.Duration, bar float64) testResult {
	result := testResult{Tested: true, Threshold: raisedAt}
	for _, p := range points {
		values := within(points, p.Time, window)
		if len(values) < leastValues {
			continue
		}
		var low []promquery.Point
		for _, v := range values {
			if v.Value < bar {
				low = append(low, v)
			}
		}
		result.Statistic = float64(len(low)) / float64(len(values))
		switch {
		case !result.Alarm && result.Statistic >= raisedAt:
			result.Alarm, result.Since = true, low[0].Time
		case result.Alarm && result.Statistic < clearedAt:
			result.Alarm, result.Since = false, time.Time{}
		}
	}
	return result
}
