// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

const (
	// wantedGain is the minimum ratio of the observed local activation rate to the measured baseline.
	wantedGain = 1.4
	// wantedAccuracy is the maximum relative error of the predicted rate.
	wantedAccuracy = 0.10
	// maxRateDifference is the maximum difference between the rates of the two realizations.
	maxRateDifference = 0.01
	// wantedImbalance is the maximum window imbalance: the busiest rank's load over the mean load, as a mean over time.
	wantedImbalance = 1.15
	// places is the number of ranks of all replicas in moedeployment.yaml.
	places = 2 * 4
)

// report is the result of the first act.
type report struct {
	answers []answer
	// before measures the default placement, after the plan as the engine's expert map, and reshuffled the same plan as
	// reshuffled weights. roundRobin measures the plan as the engine's expert map with round-robin routing.
	before, after, roundRobin, reshuffled *measurement
	plan                                  string
	predicted                             float64
	// forecast is the plan's forecast, which contains the modelled times.
	forecast *semmoev1.PlanForecast
	checks   []check
}

type check struct {
	name   string
	holds  bool
	detail string
}

// checkAnswers compares the answers of the model with the reference answers.
func checkAnswers(answers []answer) []check {
	tokens, agree, streams := 0, 0, 0
	for _, a := range answers {
		tokens += a.comparable()
		agree += a.agree(a.ids)
		if a.text == a.streamed && a.text != "" {
			streams++
		}
	}
	return []check{
		{"greedy tokens equal the reference", agree == tokens, fmt.Sprintf("%d of %d", agree, tokens)},
		{"streamed text equals the unstreamed text", streams == len(answers), fmt.Sprintf("%d of %d", streams, len(answers))},
	}
}

// checkPlan compares the measurement of the plan with the measurement of the default placement and with the plan's
// forecast.
func checkPlan(before, after *measurement, plan string, predicted float64) []check {
	planned, n := after.byPlan(plan), len(after.replies)
	gain, miss := after.lar()/before.lar(), after.lar()/predicted-1
	imbalance := after.windowImbalance()
	return []check{
		{"the local activation rate increased", gain >= wantedGain, fmt.Sprintf("%.2f times the measured baseline; the minimum is %.1f", gain, wantedGain)},
		{"the observed rate matches the prediction", math.Abs(miss) <= wantedAccuracy, fmt.Sprintf("%+.1f%% from the prediction; the limit is %.0f%%", 100*miss, 100*wantedAccuracy)},
		{"the engines' counters agree", engineAgrees(before) && engineAgrees(after), fmt.Sprintf("%.0f of %.0f activations local; routers %.0f of %.0f", after.engine.local, after.engine.all, after.local, after.all)},
		{"every rank of every replica was used", before.places() == places && after.places() == places, fmt.Sprintf("%d without and %d with the plan, of %d", before.places(), after.places(), places)},
		{"ranks are balanced", imbalance <= wantedImbalance, fmt.Sprintf("window imbalance %.3f; the limit is %.2f", imbalance, wantedImbalance)},
		checkOutputs("outputs are unchanged", before, after),
		{"the plan routed the requests", planned == n, fmt.Sprintf("%d of %d by plan %s", planned, n, plan)},
	}
}

// checkOutputs compares the generated outputs token for token.
func checkOutputs(name string, before, after *measurement) check {
	equal, n := 0, len(after.replies)
	for i := range after.replies {
		if slices.Equal(before.replies[i].output, after.replies[i].output) && len(after.replies[i].output) == newTokens {
			equal++
		}
	}
	return check{name, equal == n, fmt.Sprintf("%d of %d prompts, token by token", equal, n)}
}

// checkRoundRobin compares routing by the plan with round-robin routing on the same placement.
func checkRoundRobin(after, roundRobin *measurement) []check {
	gain := after.lar() / roundRobin.lar()
	return []check{
		{"the request router increases the rate", gain >= wantedGain && engineAgrees(roundRobin),
			fmt.Sprintf("%.2f times the rate of round-robin on the same placement; the minimum is %.1f", gain, wantedGain)},
		checkOutputs("round-robin outputs are the same", after, roundRobin),
	}
}

// checkReshuffled compares the two realizations of the plan: expert map and reshuffled weights. It compares the
// differences between each rate and the plan's forecast for the ranks that served the requests. The forecast itself
// varies between runs by more than maxRateDifference.
func checkReshuffled(before, byMap, byWeights *measurement) []check {
	apart := (byWeights.lar() - byWeights.forecast) - (byMap.lar() - byMap.forecast)
	return []check{
		checkOutputs("reshuffled weights: outputs are the same", before, byWeights),
		{"reshuffled weights: the rate is the same", math.Abs(apart) <= maxRateDifference && engineAgrees(byWeights),
			fmt.Sprintf("a difference of %+.4f for the same forecast; the limit is %.2f", apart, maxRateDifference)},
	}
}

// engineAgrees reports whether the engine and the request routers counted the same activations.
func engineAgrees(m *measurement) bool { return m.engine == m.activations }

// failed counts the checks that do not hold.
func failed(checks []check) int {
	failed := 0
	for _, c := range checks {
		if !c.holds {
			failed++
		}
	}
	return failed
}

func (r *report) print(w io.Writer) {
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "Prompt\tPod\tRank\tExpected tokens\tMillis\tContinuation")
	for _, a := range r.answers {
		fmt.Fprintf(table, "%s\t%s\t%s\t%d/%d\t%d\t%s\n", a.Name, a.pod, a.rank, a.agree(a.ids), a.comparable(), a.taken.Milliseconds(), firstRunes(a.text, 44))
	}
	table.Flush() //nolint:errcheck // a terminal
	fmt.Fprintf(w, "\n%d held-out requests, %d tokens, EP size 4, attention data parallelism\n\n", len(r.after.replies), r.after.tokens())
	all := []*measurement{r.before, r.roundRobin, r.after, r.reshuffled}
	row := func(name string, format string, value func(*measurement) float64) {
		fmt.Fprint(table, name)
		for _, m := range all {
			fmt.Fprintf(table, "\t"+format, value(m))
		}
		fmt.Fprintln(table)
	}
	fmt.Fprintf(table, "\tDefault placement\tPlan, round-robin\tPlan %s\tPlan, reshuffled weights\n", r.plan)
	row("Local activation rate, observed", "%.1f%%", func(m *measurement) float64 { return 100 * m.lar() })
	row("Local activation rate, counted by the engine", "%.1f%%", func(m *measurement) float64 { return 100 * m.engine.lar() })
	fmt.Fprintf(table, "Local activation rate, predicted\t\t\t%.1f%%\t%.1f%%\n", 100*r.predicted, 100*r.predicted)
	row("Remote activations", "%.1f%%", func(m *measurement) float64 { return 100 * (1 - m.lar()) })
	row("Window imbalance of ranks", "%.3f", (*measurement).windowImbalance)
	if f := r.forecast; f != nil && f.LayerNanos > 0 {
		micros := func(nanos int64) float64 { return float64(nanos) / 1000 }
		fmt.Fprintf(table, "Microseconds of an MoE layer, modelled\t%.1f\t\t%.1f\t%.1f\n", micros(f.BaselineLayerNanos), micros(f.LayerNanos), micros(f.LayerNanos))
	}
	row("Milliseconds of a request, measured", "%.1f", (*measurement).milliseconds)
	row("Seconds", "%.1f", func(m *measurement) float64 { return m.taken.Seconds() })
	table.Flush() //nolint:errcheck // a terminal
	fmt.Fprintln(w)
	for _, line := range r.times() {
		fmt.Fprintln(w, line)
	}
	printChecks(w, r.checks)
}

// times describes the modelled and the measured times. No check depends on the times: the reference engine computes all
// ranks of a pod on the CPUs of one machine, so that its times do not reflect the modelled hardware.
func (r *report) times() []string {
	var lines []string
	if f := r.forecast; f != nil && f.LayerNanos > 0 {
		lines = append(lines, fmt.Sprintf("Modelled: on %s the plan saves %.1f%% of an MoE layer's time with batches of %v tokens (95%% interval %.1f%% to %.1f%%).",
			f.Hardware, float64(f.SavedMilli)/10, f.BatchTokens, float64(f.SavedLowMilli)/10, float64(f.SavedHighMilli)/10))
	}
	change, interval := r.after.slowerThan(r.before)
	finding := "the difference is within noise"
	switch {
	case change > interval:
		finding = "slower"
	case change < -interval:
		finding = "faster"
	}
	return append(lines, fmt.Sprintf("Measured: on CPUs, which exchange nothing, a request takes %+.1f%% (95%% interval %+.1f%% to %+.1f%%) under the plan: %s.",
		100*change, 100*(change-interval), 100*(change+interval), finding))
}

func printChecks(w io.Writer, checks []check) {
	fmt.Fprintln(w)
	for _, c := range checks {
		verdict := "  ok"
		if !c.holds {
			verdict = "FAIL"
		}
		fmt.Fprintf(w, "%s  %-42s %s\n", verdict, c.name, c.detail)
	}
}

func firstRunes(text string, n int) string {
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= n {
		return text
	}
	return string([]rune(text)[:n]) + "..."
}
