// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/solver/drift"
)

// TestDetect uses a drift test with reference value 0.5 for the share of unknown tokens and decision interval 1.5.
func TestDetect(t *testing.T) {
	calibration := &drift.Calibration{
		Ranks: 1, Highest: []float64{1}, Predicted: []float64{1}, Local: []float64{1},
		Residual: drift.Chart{Reference: 1, Threshold: 1}, Level: drift.Chart{Reference: 1, Threshold: 1},
		Novelty: drift.Chart{Reference: 0.5, Threshold: 1.5},
	}
	change := time.Unix(100, 0)
	series := func(kinds string) []sampled {
		var samples []sampled
		for i, kind := range kinds {
			s := sampled{change.Add(time.Duration(i-4) * time.Second), drift.Sample{Local: 1, Highest: 1, Predicted: 1, Known: 1, Pairs: 1}}
			if kind == 'n' {
				s.Known, s.Pairs = 0, 0
			}
			samples = append(samples, s)
		}
		return samples
	}
	// The fifth sample is the last sample before the change. Samples n have only unknown tokens, samples o none.
	for name, test := range map[string]struct {
		samples string
		want    detection
	}{
		"no change":             {"ooooooooooo", detection{usual: 5, changed: 6}},
		"detected":              {"ooooonnnnnn", detection{usual: 5, changed: 6, needed: 4}},
		"unknown before change": {"ooonnnnnnnn", detection{usual: 5, changed: 6, needed: 2}},
		"a false alarm":         {"nnnnnoooooo", detection{usual: 5, falsely: 2, changed: 6, needed: 1}},
		"too few samples":       {"ooooonnn", detection{usual: 5, changed: 3}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, detect(calibration, series(test.samples), change), cmp.AllowUnexported(detection{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// shifted returns the result of a second act in which all checks hold.
func shifted() *shift {
	by := func(local float64, plan string) *measurement {
		m := measured(local)
		for i := range m.replies {
			m.replies[i].plan = plan
		}
		return m
	}
	plan := func(short string) *semmoev1.PlacementPlan {
		return &semmoev1.PlacementPlan{Status: semmoev1.PlacementPlanStatus{Plan: short, Verdict: semmoev1.VerdictGain, Tier: semmoev1.TierLayout}}
	}
	return &shift{
		base: plan("base"), again: plan("again"), scratch: plan("scratch"), bad: plan("bad"),
		usual: by(500, "base"), shifted: by(280, "base"), replanned: by(350, "again"), planned: by(360, "scratch"), kept: by(360, "scratch"),
		detection: detection{usual: 300, changed: 300, needed: 9},
		reported:  time.Minute, drift: semmoev1.DriftStatus{StatisticMilli: 2000, ThresholdMilli: 1000},
		jobs: [2]int{1, 1}, failure: "LocalityWorse", ready: true,
		answers: []answer{{goldenCase: goldenCase{GreedyIDs: []int{1}, GreedyMargin: []float64{1}}, ids: []int{1}, text: "a", streamed: "a"}},
	}
}

// TestShiftChecks checks that each check of the second act can fail without failing another one.
func TestShiftChecks(t *testing.T) {
	for name, test := range map[string]struct {
		change func(s *shift)
		fails  []string
	}{
		"all hold":                  {func(*shift) {}, nil},
		"a false alarm":             {func(s *shift) { s.detection.falsely = 1 }, []string{"usual traffic raises no alarm"}},
		"no detection":              {func(s *shift) { s.detection.needed = 0 }, []string{"changed traffic is detected"}},
		"late detection":            {func(s *shift) { s.detection.needed = detectionLimit + 1 }, []string{"changed traffic is detected"}},
		"reported late":             {func(s *shift) { s.reported = time.Hour }, nil},
		"reported without evidence": {func(s *shift) { s.drift.StatisticMilli = 900 }, []string{"the operator reports the drift"}},
		"request under old plan":    {func(s *shift) { s.replanned.replies[3].plan = "base" }, []string{"the new plan is in service"}},
		"another profiling Job":     {func(s *shift) { s.jobs[1]++ }, []string{"no profiling Job was needed"}},
		"no gain":                   {func(s *shift) { s.shifted = measured(340) }, []string{"the local activation rate recovers"}},
		"worse than from scratch":   {func(s *shift) { s.planned.local, s.planned.engine.local = 400, 400 }, []string{"the rate is close to a plan from scratch"}},
		"request under wrong plan":  {func(s *shift) { s.planned.replies[0].plan = "again" }, []string{"the rate is close to a plan from scratch"}},
		"not ready at a poll":       {func(s *shift) { s.ready = false }, []string{"the bad plan was rolled back automatically"}},
		"bad plan without a gain":   {func(s *shift) { s.bad.Status.Verdict = semmoev1.VerdictNoGainExpected }, []string{"the bad plan was rolled back automatically"}},
		"request under bad plan":    {func(s *shift) { s.kept.replies[5].plan = "bad" }, []string{"the previous plan continues to serve"}},
		"engine ignores its map":    {func(s *shift) { s.kept.engine.local = 250 }, []string{"the engines' counters agree"}},
		"a different token":         {func(s *shift) { s.answers[0].ids = []int{2} }, []string{"greedy tokens equal the reference"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := shifted()
			test.change(s)
			if diff := cmp.Diff(test.fails, failing(s.checks())); diff != "" {
				t.Error(diff)
			}
		})
	}
}
