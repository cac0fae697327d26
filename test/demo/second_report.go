// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

const (
	// detectionLimit is the maximum number of sampled requests until a switch to other kinds of text is detected. It is
	// the design target of the drift test with attention data parallelism.
	detectionLimit = 80
	// wantedRise is the minimum ratio of the new plan's rate to the old plan's rate.
	wantedRise = 1.1
	// wantedOfScratch is the minimum ratio of the rate of the operator's new plan to the rate of a plan from scratch.
	wantedOfScratch = 0.9
)

// checks returns the checks of the second act.
func (s *shift) checks() []check {
	rise, part := s.replanned.lar()/s.shifted.lar(), s.replanned.lar()/s.planned.lar()
	checks := []check{
		{"usual traffic raises no alarm", s.detection.usual > 0 && s.detection.falsely == 0, fmt.Sprintf("%d of %d sampled requests raised an alarm", s.detection.falsely, s.detection.usual)},
		{"changed traffic is detected", s.detection.needed > 0 && s.detection.needed <= detectionLimit,
			fmt.Sprintf("after %d of %d sampled requests; the limit is %d", s.detection.needed, s.detection.changed, detectionLimit)},
		// The time depends on the machine. The operator checks once a minute, and waitDrift bounds the wait.
		{"the operator reports the drift", s.drift.StatisticMilli > s.drift.ThresholdMilli, fmt.Sprintf("%.0f s after the change, statistic %.1f of threshold %.1f",
			s.reported.Seconds(), float64(s.drift.StatisticMilli)/1000, float64(s.drift.ThresholdMilli)/1000)},
		{"the new plan is in service", s.replanned.byPlan(s.again.Status.Plan) == len(s.replanned.replies),
			fmt.Sprintf("%.0f s after the change, tier %s; %d of %d requests by plan %s", s.recovered.Seconds(), s.again.Status.Tier, s.replanned.byPlan(s.again.Status.Plan), len(s.replanned.replies), s.again.Status.Plan)},
		{"no profiling Job was needed", s.jobs[0] == s.jobs[1], fmt.Sprintf("%d before the change, %d after it", s.jobs[0], s.jobs[1])},
		{"the local activation rate recovers", rise >= wantedRise, fmt.Sprintf("%.2f times the rate of the old plan; the minimum is %.1f", rise, wantedRise)},
		{"the rate is close to a plan from scratch", part >= wantedOfScratch && s.planned.byPlan(s.scratch.Status.Plan) == len(s.planned.replies),
			fmt.Sprintf("%.1f%% of its rate; the minimum is %.0f%%", 100*part, 100*wantedOfScratch)},
		{"the bad plan was rolled back automatically", s.failure != "" && s.ready && s.bad.Status.Verdict == semmoev1.VerdictGain, s.failure},
		{"the previous plan continues to serve", s.kept.byPlan(s.scratch.Status.Plan) == len(s.kept.replies),
			fmt.Sprintf("%d of %d requests by plan %s", s.kept.byPlan(s.scratch.Status.Plan), len(s.kept.replies), s.scratch.Status.Plan)},
	}
	for _, m := range s.measurements() {
		if !engineAgrees(m) {
			return append(checks, check{"the engines' counters agree", false, fmt.Sprintf("%.0f of %.0f activations local; routers %.0f of %.0f", m.engine.local, m.engine.all, m.local, m.all)})
		}
	}
	checks = append(checks, check{"the engines' counters agree", true, fmt.Sprintf("in all %d measurements", len(s.measurements()))})
	return append(checks, checkAnswers(s.answers)...)
}

// measurements returns all measurements in chronological order.
func (s *shift) measurements() []*measurement {
	return []*measurement{s.usual, s.shifted, s.replanned, s.planned, s.kept}
}

// print prints the measurements, and the operator's messages on the change and on its new plan.
func (s *shift) print(w io.Writer) {
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\tProse, its plan\tCode, plan for prose\tCode, re-planned\tCode, plan from scratch\tafter the bad plan")
	row := func(name string, value func(*measurement) string) {
		fmt.Fprint(table, name)
		for _, m := range s.measurements() {
			fmt.Fprint(table, "\t"+value(m))
		}
		fmt.Fprintln(table)
	}
	row("Requests", func(m *measurement) string { return fmt.Sprint(len(m.replies)) })
	row("Local activation rate, observed", func(m *measurement) string { return fmt.Sprintf("%.1f%%", 100*m.lar()) })
	row("Window imbalance of ranks", func(m *measurement) string { return fmt.Sprintf("%.3f", m.windowImbalance()) })
	row("Seconds", func(m *measurement) string { return fmt.Sprintf("%.1f", m.taken.Seconds()) })
	table.Flush() //nolint:errcheck // a terminal
	fmt.Fprintf(w, "\nThe operator's message on the change: %s\n", s.why)
	if c := s.again.Status.Comparison; c != nil {
		fmt.Fprintf(w, "The operator's new plan, from %d recent requests: %.1f%% instead of %.1f%%, %d experts moved; %s\n",
			c.Requests, float64(c.CandidateLARMilli)/10, float64(c.CurrentLARMilli)/10, c.MovedExperts, c.Reason)
	}
}
