// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/solver/drift"
)

// RateUnder returns the rate of the requests that routers sampled under a layout within the window around now, and
// dispatched by the tables of a plan (any tables if tables is ""). Results of older tables do not apply to newer ones.
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

// RouterEvidence is the evidence of the request routers about requests under the plan in service.
type RouterEvidence struct {
	// Answered is the number of routers that returned a report.
	Answered int
	// Newest is the time of the newest sample in the window; zero if there is none.
	Newest time.Time
	// Tables is the full digest of the plan whose tables scored the newest scored sample. Samples are the samples that
	// these tables scored, oldest first.
	Tables  string
	Samples []TimedSample
	// Calibration is the calibration for these samples; nil if the plan has none.
	Calibration *drift.Calibration
}

// TimedSample is a sample with its time.
type TimedSample struct {
	Time time.Time
	drift.Sample
}

// EvidenceOf collects the samples of routers under a layout within the window around now. Older samples do not describe
// the present. Samples equally far in the future come from a wrong clock.
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

// sampleFor converts an observation to a test sample. It returns false if other tables or no tables scored the
// observation, or if it has no activation.
func sampleFor(o lar.Observation, tables string) (sample TimedSample, ok bool) {
	if o.Forecast == nil || o.Forecast.Tables != tables || o.Total <= 0 || o.Local < 0 || o.Local > o.Total {
		return TimedSample{}, false
	}
	return TimedSample{o.Time, drift.Sample{
		Best: o.Forecast.Best, Rank: o.Rank, Highest: o.Forecast.Highest, Predicted: o.Forecast.Predicted,
		Local: float64(o.Local) / float64(o.Total), Known: o.Forecast.Known, Pairs: o.Forecast.Pairs,
	}}, true
}

// clearedAt is the share of the threshold below which the statistic must fall for an alarm to end. It prevents
// flapping.
const clearedAt = 0.5

// testSamples runs the sequential test over the samples, oldest first. Alarm and hysteresis are functions of the
// samples, without memory of earlier runs, so every reader reaches the same result.
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
		// The causes cover the samples since the onset.
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
	// windowSteps is the number of values requested per window.
	windowSteps = 60
	// staleSteps is the maximum age of the newest value, in steps.
	staleSteps = 3
	// minValues is the minimum number of values in a window: three quarters.
	minValues = windowSteps * 3 / 4
	// raisedAt is the share of a window's values that must be below the bar for an alarm.
	raisedAt = 0.9
)

// EngineEvidence is the evidence of engines that shuffle tokens by the tables of a plan and count activations.
type EngineEvidence struct {
	// Problem is why there is no evidence.
	Problem desired.Finding
	// Points are the rates of the engines that use the tables, in intervals of lar.EngineBucketTime, oldest first.
	Points []lar.Point
	Window time.Duration
}

const (
	// maxEngineWindow is the maximum window: routers keep two of them.
	maxEngineWindow = lar.EngineBuckets / 2 * lar.EngineBucketTime
	// minEngineValues is the minimum number of values in a window.
	minEngineValues = 3
	// staleEngines is the maximum age of the newest value: managers read routers once a minute.
	staleEngines = 5 * lar.EngineBucketTime
)

// EngineEvidenceOf collects what engines report about the tables with this digest.
func EngineEvidenceOf(reports []lar.Report, tables string, now time.Time, window time.Duration) EngineEvidence {
	e := EngineEvidence{Window: min(max(window, minEngineValues*lar.EngineBucketTime), maxEngineWindow)}
	for _, p := range lar.EnginePoints(reports, tables) {
		if age := now.Sub(p.Time); age <= 2*e.Window && age >= -e.Window {
			e.Points = append(e.Points, p)
		}
	}
	if len(e.Points) == 0 {
		e.Problem = consumersProblem(reports, tables)
	}
	return e
}

// consumersProblem returns why no engine counts activations under the tables with this digest; its zero value if an
// engine uses them, or if there is no report.
func consumersProblem(reports []lar.Report, tables string) desired.Finding {
	problem := desired.Finding{}
	if len(reports) > 0 {
		problem = desired.Finding{Reason: "NotObserved", Message: "No engine pod exports the metrics of a consumer of tables (semmoe_engine_tables_info), so the local activation rate is unknown. Use an image with a consumer, or set spec.drift.source to Prometheus"}
	}
	for _, report := range reports {
		for _, engine := range report.Engines {
			switch {
			case engine.Problem != "":
				return desired.Finding{Reason: "CountersInvalid", Message: fmt.Sprintf("The counters of pod %s are not used: %s", engine.Pod, engine.Problem)}
			case engine.Tables == tables:
				return desired.Finding{}
			case engine.Tables != "" || engine.Refused != "":
				text := ConsumerText(engine, tables)
				if engine.Refused == "" {
					text += ". If this persists, see the log of its container follow-tables"
				}
				problem = desired.Finding{Reason: "TablesNotLoaded", Message: fmt.Sprintf("Pod %s does not shuffle tokens by the tables of the plan: %s", engine.Pod, text)}
			}
		}
	}
	return problem
}

// ConsumerText returns why an engine does not use the tables with this digest, or why its counts are not used; "" if
// both are used.
func ConsumerText(e lar.EngineCounts, tables string) string {
	switch {
	case e.Problem != "":
		return e.Problem
	case e.Tables == tables:
		return ""
	case e.Refused != "":
		return "it refuses the files of the plan, reason " + e.Refused
	case e.Tables != "":
		return fmt.Sprintf("it uses the tables of plan %s", artifact.Digest(e.Tables).Short())
	}
	return "it exports no semmoe_engine_tables_info"
}

// minValues returns the minimum number of values in the window: three quarters.
func (e EngineEvidence) minValues() int {
	return max(minEngineValues, int(e.Window/lar.EngineBucketTime)*3/4)
}

// covered reports whether the last window has enough values.
func (e EngineEvidence) covered() bool {
	return len(within(e.Points, e.Points[len(e.Points)-1].Time, e.Window)) >= e.minValues()
}

// PrometheusEvidence is the evidence of Prometheus.
type PrometheusEvidence struct {
	// Problem is why there is no evidence.
	Problem desired.Finding
	// Points are the numeric values under the plan in use within at most two windows, oldest first.
	Points []lar.Point
	Window time.Duration
	// End is the end of the last window.
	End time.Time
}

// Step returns the time between two values.
func (e PrometheusEvidence) Step() time.Duration { return e.Window / windowSteps }

// covered reports whether the last window has enough values.
func (e PrometheusEvidence) covered() bool {
	return len(within(e.Points, e.End, e.Window)) >= minValues
}

// within returns the points of the window that ends at end.
func within(points []lar.Point, end time.Time, window time.Duration) []lar.Point {
	first, _ := slices.BinarySearchFunc(points, end.Add(-window), func(p lar.Point, t time.Time) int {
		if p.Time.After(t) {
			return 1 // the start belongs to the previous window
		}
		return -1
	})
	last, _ := slices.BinarySearchFunc(points, end, func(p lar.Point, t time.Time) int {
		if p.Time.After(t) {
			return 1
		}
		return -1
	})
	return points[first:last]
}

// Numbers returns the points with numeric values since from.
func Numbers(points []lar.Point, from time.Time) []lar.Point {
	var kept []lar.Point
	for _, p := range points {
		if !math.IsNaN(p.Value) && !math.IsInf(p.Value, 0) && !p.Time.Before(from) {
			kept = append(kept, p)
		}
	}
	return kept
}

// testValues moves the window along the points. It raises an alarm if nearly all values of the window are below the bar
// (raisedAt), and clears it if fewer than half are. With two windows of points, the result is a function of the points
// only.
func testValues(points []lar.Point, window time.Duration, bar float64, minValues int) testResult {
	result := testResult{Tested: true, Threshold: raisedAt}
	for _, p := range points {
		values := within(points, p.Time, window)
		if len(values) < minValues {
			continue
		}
		var low []lar.Point
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
