// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// Explanation describes the expected benefit of a plan and its use.
type Explanation struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Digest    string `json:"planDigest,omitempty"`
	// Verdict is empty while the plan is not solved. Why explains the verdict in a sentence.
	Verdict semmoev1.Verdict `json:"verdict,omitempty"`
	Why     string           `json:"why"`
	// Facts are in display order.
	Facts []Fact `json:"facts"`
	// Serves lists the MoEDeployments that serve with the plan, roll it out, or are to roll it out.
	Serves []Use `json:"serves"`
	// HeldBack lists the reasons that block the plan.
	HeldBack []string `json:"heldBack"`

	tone terminal.Tone
}

// Fact is a named property of a plan.
type Fact struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// Use is a MoEDeployment that uses a plan, with the roles of the plan.
type Use struct {
	Deployment string   `json:"deployment"`
	Roles      []string `json:"roles"`
}

// Explain describes a plan, given the MoEDeployments of its namespace.
func Explain(plan *semmoev1.PlacementPlan, moeds []semmoev1.MoEDeployment) Explanation {
	e := Explanation{Namespace: plan.Namespace, Name: plan.Name, Digest: plan.Status.Plan, Verdict: plan.Status.Verdict, Serves: []Use{}, HeldBack: []string{}}
	e.Why, e.tone = whyOf(plan)
	e.Facts = factsOf(plan)
	for i := range moeds {
		moed := &moeds[i]
		if roles := rolesOf(moed, plan); slices.ContainsFunc(roles, usesPlan) {
			e.Serves = append(e.Serves, Use{moed.Name, slices.DeleteFunc(roles, func(role string) bool { return !usesPlan(role) })})
		}
		if text := heldBack(moed, plan); text != "" {
			e.HeldBack = append(e.HeldBack, text)
		}
	}
	for _, failed := range marksOf(plan, semmoev1.AnnotationFailed) {
		e.HeldBack = append(e.HeldBack, "It failed on a canary and is not tried again. Revision "+failed)
	}
	for _, changed := range marksOf(plan, semmoev1.AnnotationOutputChanged) {
		e.HeldBack = append(e.HeldBack, "The outputs of the engine changed with this plan. Revision "+changed)
	}
	return e
}

// usesPlan reports whether a role comes from a deployment. The other roles come from annotations of the plan.
func usesPlan(role string) bool { return role != roleTakenBack && role != roleOutputChanged }

// whyOf explains the verdict in a sentence.
func whyOf(plan *semmoev1.PlacementPlan) (string, terminal.Tone) {
	forecast, comparison := plan.Status.Forecast, plan.Status.Comparison
	if comparison != nil && comparison.Requests == 0 { // a comparison by counts has no rates
		forecast, comparison = nil, nil
	}
	ready := condition(plan.Status.Conditions, semmoev1.ConditionReady)
	switch verdict := plan.Status.Verdict; {
	case verdict == "":
		return fmt.Sprintf("The plan is not solved yet (%s): %s", ready.Reason, ready.Message), terminal.Busy
	case verdict == semmoev1.VerdictLocalityDoesNotPay:
		return "Locality does not pay at this batch size: latency dominates the exchange, and even a rate of 100% would not reach the required gain. The plan is not used", terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && comparison != nil:
		return fmt.Sprintf("The gain over the plan in service is too small: %s versus %s of activations are local. The plan is not used", percent(comparison.CandidateLARMilli), percent(comparison.CurrentLARMilli)), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && messages(forecast) != "":
		return "The gain is too small: the plan has " + messages(forecast), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && forecast != nil && forecast.Reason != "":
		return fmt.Sprintf("The plan is not rolled out: %s. %s of activations would be local, versus %s without the plan", forecast.Reason, percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && slower(forecast):
		return fmt.Sprintf("More activations would be local (%s versus %s), but the modelled time of a layer is %.1f µs versus %.1f µs. The plan is not used", percent(forecast.LARMilli), percent(forecast.BaselineMilli), micros(forecast.LayerNanos), micros(forecast.BaselineLayerNanos)), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && forecast != nil:
		return fmt.Sprintf("The gain is too small: %s of activations would be local, versus %s without the plan. The requests use all experts evenly, or the profile is too small to show a difference", percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Faint
	case comparison != nil:
		return fmt.Sprintf("A gain is expected: %s of activations are local on recent requests, versus %s with the plan in service", percent(comparison.CandidateLARMilli), percent(comparison.CurrentLARMilli)), terminal.Good
	case messages(forecast) != "":
		return "A gain is expected: the plan has " + messages(forecast), terminal.Good
	case forecast != nil && forecast.Reason != "":
		return fmt.Sprintf("A gain is expected: %s; %s of activations are local, versus %s without the plan", forecast.Reason, percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Good
	case forecast != nil:
		return fmt.Sprintf("A gain is expected: %s of activations are local, versus %s without the plan", percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Good
	}
	return fmt.Sprintf("The profile has only token counts, without rates: %s", verdictLabels[plan.Status.Verdict]), terminal.Plain
}

// messages returns the mean number of remote ranks per token, for plans without token shuffling. It is empty for other
// plans.
func messages(forecast *semmoev1.PlanForecast) string {
	if forecast == nil || forecast.BaselineRemoteRanksMilli == 0 {
		return ""
	}
	return fmt.Sprintf("the experts of a token on %.2f remote ranks, versus %.2f with the default placement", float64(forecast.RemoteRanksMilli)/1000, float64(forecast.BaselineRemoteRanksMilli)/1000)
}

// slower reports whether a plan increases the local activation rate but also the modelled time of a layer.
func slower(f *semmoev1.PlanForecast) bool {
	return f != nil && f.LARMilli > f.BaselineMilli && f.LayerNanos > f.BaselineLayerNanos
}

func factsOf(plan *semmoev1.PlacementPlan) []Fact {
	facts := []Fact{}
	add := func(name, format string, args ...any) {
		facts = append(facts, Fact{name, fmt.Sprintf(format, args...)})
	}
	spec, status := plan.Spec, plan.Status
	add("Made from", "AffinityProfile %s, for engine %s with attention %s on %s; realization %s", spec.ProfileRef.Name, spec.Engine, spec.Attention, plural(spec.ExpertParallelSize, "rank"), spec.Realization)
	if ranks := messages(status.Forecast); ranks != "" {
		add("Promise", "%s. Tokens are not shuffled: the local activation rate is %s with any plan", ranks, percent(status.Forecast.LARMilli))
	} else if f := status.Forecast; f != nil {
		bound := ""
		if f.UpperBoundMilli > 0 {
			bound = fmt.Sprintf("; the upper bound of all plans is %s", percent(f.UpperBoundMilli))
		}
		add("Promise", "a local activation rate of %s on held-out requests, versus %s with the default placement%s", percent(f.LARMilli), percent(f.BaselineMilli), bound)
		if f.WindowImbalanceMilli > 0 {
			add("Balance", "the busiest rank has %.2f times the mean load (windows of 128 requests)", float64(f.WindowImbalanceMilli)/1000)
		}
	}
	if status.RedundantExperts > 0 || spec.ChoosesRedundantExperts() && status.Verdict != "" {
		copies := plural(status.RedundantExperts, "redundant expert") + " per layer, over all ranks"
		if spec.ChoosesRedundantExperts() {
			copies += ", chosen for " + memoryText(spec.RedundantMemoryBytes) + " per rank"
		}
		add("Copies", "%s", copies)
	}
	if spec.Current != nil {
		add("Compared with", "plan %s, which was in service%s", artifact.Digest(spec.Current.PlanDigest).Short(), comparedOn(status.Comparison))
	} else if status.Verdict != "" {
		add("Compared with", "the default placement with round-robin requests")
	}
	if f := status.Forecast; f != nil && f.BaselineLayerNanos > 0 {
		add("Time", "%s", timeText(f.LayerNanos, "with the default placement", f.BaselineLayerNanos, f.Hardware))
		if len(f.BatchTokens) > 0 {
			add("Proof", "%.1f%% of the time saved (95%% confidence interval %.1f%% to %.1f%%) with %v tokens per batch", float64(f.SavedMilli)/10, float64(f.SavedLowMilli)/10, float64(f.SavedHighMilli)/10, f.BatchTokens)
		}
		if f.Chosen != "" {
			add("Point of the front", "%s", f.Chosen)
		}
	}
	if c := status.Comparison; c != nil {
		if c.CurrentNanos > 0 {
			add("Time", "%s", timeText(c.CandidateNanos, "with the plan in service", c.CurrentNanos, c.Hardware))
		}
		if c.Reason != "" {
			add("Tier chosen", "%s", c.Reason)
		}
	}
	switch {
	case status.Tier == semmoev1.TierTables:
		add("Rollout", "request routers load the new tables; no pod restarts and no expert moves")
	case status.Tier == semmoev1.TierLayout && status.Comparison != nil:
		add("Rollout", "a canary, then all replicas; moved experts: %d", status.Comparison.MovedExperts)
	case status.Verdict == semmoev1.VerdictGain:
		add("Rollout", "a canary, then all replicas; each replica restarts with the plan")
	}
	if status.ConfigMap != "" {
		add("Published as", "ConfigMap %s", strings.Join(slices.DeleteFunc([]string{status.ConfigMap, status.StableConfigMap}, func(n string) bool { return n == "" }), " and "))
	}
	return facts
}

// timeText compares the modelled time of an MoE layer with a plan, and with the baseline.
func timeText(nanos int64, baseline string, baselineNanos int64, hardware string) string {
	less, word := 1-float64(nanos)/float64(baselineNanos), "less"
	if less < 0 {
		less, word = -less, "more"
	}
	return fmt.Sprintf("the modelled time of an MoE layer is %.1f µs, versus %.1f µs %s: %.1f%% %s%s", micros(nanos), micros(baselineNanos), baseline, 100*less, word, modelledBy(hardware))
}

func micros(nanos int64) float64 { return float64(nanos) / 1000 }

// modelledBy names the hardware profile of modelled times. It is empty for plans of earlier releases, which do not
// record it.
func modelledBy(hardware string) string {
	if hardware == "" {
		return ""
	}
	return ", hardware profile " + hardware
}

func comparedOn(c *semmoev1.PlanComparison) string {
	if c == nil || c.Requests == 0 {
		return ""
	}
	return ", on " + plural(c.Requests, "recent request")
}

// heldBack returns the reason and message of the condition RolledOut if a deployment is to use the plan and its rollout
// is not complete, or else an empty string.
func heldBack(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) string {
	c := condition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
	short := plan.Status.Plan
	wanted := moed.Status.Plan == plan.Name || short != "" && strings.Contains(c.Message, short)
	if c.Status == metav1.ConditionTrue && !strings.Contains(c.Message, "="+short) || !wanted || short == "" {
		return ""
	}
	return fmt.Sprintf("MoEDeployment %s, %s: %s", moed.Name, c.Reason, c.Message)
}

// Text formats an explanation for a terminal.
func (e Explanation) Text(style terminal.Style) string {
	var out strings.Builder
	line := func(margin int, text ...terminal.Span) { out.WriteString(style.Paragraph(text, margin)) }
	name := terminal.Text{{Text: "PlacementPlan ", Tone: terminal.Faint}, {Text: e.Namespace + "/" + e.Name, Tone: terminal.Strong}}
	if e.Digest != "" {
		name = append(name, terminal.Span{Text: ", plan " + e.Digest})
	}
	line(0, name...)
	line(0, terminal.Span{Text: e.Why + ".", Tone: e.tone})
	out.WriteString("\n")
	for _, fact := range e.Facts {
		line(0, terminal.Span{Text: fact.Name + ": ", Tone: terminal.Faint}, terminal.Span{Text: fact.Text})
	}
	for _, use := range e.Serves {
		text := terminal.Text{{Text: "Used by: ", Tone: terminal.Faint}, {Text: "MoEDeployment " + use.Deployment}}
		for _, role := range use.Roles {
			text = append(text, terminal.Span{Text: ", "}, roleLabels[role])
		}
		line(0, text...)
	}
	if len(e.Serves) == 0 {
		line(0, terminal.Span{Text: "Used by: ", Tone: terminal.Faint}, terminal.Span{Text: "no MoEDeployment"})
	}
	for _, reason := range e.HeldBack {
		line(0, terminal.Span{Text: "Blocked: ", Tone: terminal.Busy}, terminal.Span{Text: reason})
	}
	return out.String()
}
