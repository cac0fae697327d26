package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

const (
	// wantedGain is how many times the measured baseline the observed local activation rate must be.
	wantedGain = 1.4
	// wantedAccuracy is how far the observed rate may be from the predicted one, relative to it.
	wantedAccuracy = 0.10
	// wantedImbalance bounds the mean over time of the busiest rank's load over the mean load.
	wantedImbalance = 1.15
	// places is the number of ranks of all replicas: what moedeployment.yaml asks for.
	places = 2 * 4
)

// report is the demo's result.
type report struct {
	answers       []answer
	before, after *measurement
	plan          string
	predicted     float64
	checks        []check
}

type check struct {
	name   string
	holds  bool
	detail string
}

// checkAnswers compares what the model says with what it is known to say.
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
		{"streamed text equals the whole", streams == len(answers), fmt.Sprintf("%d of %d", streams, len(answers))},
	}
}

// checkPlan compares what is served under the plan with what was served without it, and with what the plan promised.
func checkPlan(before, after *measurement, plan string, predicted float64) []check {
	equal, planned := 0, 0
	for i := range after.replies {
		if slices.Equal(before.replies[i].output, after.replies[i].output) && len(after.replies[i].output) == newTokens {
			equal++
		}
		if after.replies[i].plan == plan {
			planned++
		}
	}
	n := len(after.replies)
	gain, miss := after.lar()/before.lar(), after.lar()/predicted-1
	imbalance := after.windowImbalance()
	return []check{
		{"local activation rate has risen", gain >= wantedGain, fmt.Sprintf("%.2f times the measured baseline; wanted is %.1f", gain, wantedGain)},
		{"the plan keeps its promise", math.Abs(miss) <= wantedAccuracy, fmt.Sprintf("%+.1f%% of the prediction; allowed is %.0f%%", 100*miss, 100*wantedAccuracy)},
		{"the engine counts the same", engineAgrees(before) && engineAgrees(after), fmt.Sprintf("%.0f of %.0f activations local; routers %.0f of %.0f", after.engine.local, after.engine.all, after.local, after.all)},
		{"every rank of every replica was used", before.places() == places && after.places() == places, fmt.Sprintf("%d without and %d with the plan, of %d", before.places(), after.places(), places)},
		{"ranks are balanced", imbalance <= wantedImbalance, fmt.Sprintf("window imbalance %.3f; allowed is %.2f", imbalance, wantedImbalance)},
		{"outputs are unchanged", equal == n, fmt.Sprintf("%d of %d prompts, token for token", equal, n)},
		{"requests were sent by the plan", planned == n, fmt.Sprintf("%d of %d by plan %s", planned, n, plan)},
	}
}

// engineAgrees tells whether engine and request routers have counted the same.
func engineAgrees(m *measurement) bool { return m.engine == m.activations }

func (r *report) failed() int {
	failed := 0
	for _, c := range r.checks {
		if !c.holds {
			failed++
		}
	}
	return failed
}

func (r *report) print(w io.Writer) {
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "Prompt\tPod\tRank\tTokens as expected\tMillis\tContinuation")
	for _, a := range r.answers {
		fmt.Fprintf(table, "%s\t%s\t%s\t%d/%d\t%d\t%s\n", a.Name, a.pod, a.rank, a.agree(a.ids), a.comparable(), a.taken.Milliseconds(), firstRunes(a.text, 44))
	}
	table.Flush() //nolint:errcheck // a terminal
	fmt.Fprintf(w, "\n%d held-out requests, %d tokens, EP size 4, attention data parallelism\n\n", len(r.after.replies), r.after.tokens())
	fmt.Fprintf(table, "\tDefault placement\tPlan %s\n", r.plan)
	fmt.Fprintf(table, "Local activation rate, observed\t%.1f%%\t%.1f%%\n", 100*r.before.lar(), 100*r.after.lar())
	fmt.Fprintf(table, "Local activation rate, counted by the engine\t%.1f%%\t%.1f%%\n", 100*r.before.engine.lar(), 100*r.after.engine.lar())
	fmt.Fprintf(table, "Local activation rate, predicted\t\t%.1f%%\n", 100*r.predicted)
	fmt.Fprintf(table, "Remote activations\t%.1f%%\t%.1f%%\n", 100*(1-r.before.lar()), 100*(1-r.after.lar()))
	fmt.Fprintf(table, "Window imbalance of ranks\t%.3f\t%.3f\n", r.before.windowImbalance(), r.after.windowImbalance())
	fmt.Fprintf(table, "Seconds\t%.1f\t%.1f\n", r.before.taken.Seconds(), r.after.taken.Seconds())
	table.Flush() //nolint:errcheck // a terminal
	fmt.Fprintln(w)
	for _, c := range r.checks {
		verdict := "  ok"
		if !c.holds {
			verdict = "FAIL"
		}
		fmt.Fprintf(w, "%s  %-36s %s\n", verdict, c.name, c.detail)
	}
}

func firstRunes(text string, n int) string {
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= n {
		return text
	}
	return string([]rune(text)[:n]) + "..."
}
