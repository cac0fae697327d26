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

// Explanation says what a plan is worth and what becomes of it.
type Explanation struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Digest    string `json:"planDigest,omitempty"`
	// Verdict is empty while the plan is not solved; Why says it in a sentence.
	Verdict semmoev1.Verdict `json:"verdict,omitempty"`
	Why     string           `json:"why"`
	// Facts are in the order in which they are told.
	Facts []Fact `json:"facts"`
	// Serves names the MoEDeployments that serve under it, try it, or want it.
	Serves []Use `json:"serves"`
	// HeldBack are the reasons for which it is not in service everywhere.
	HeldBack []string `json:"heldBack"`

	tone terminal.Tone
}

// Fact is something to know of a plan.
type Fact struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// Use is a MoEDeployment that has to do with a plan.
type Use struct {
	Deployment string   `json:"deployment"`
	Roles      []string `json:"roles"`
}

// Explain tells of a plan, given the MoEDeployments of its namespace.
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
		e.HeldBack = append(e.HeldBack, "It has failed on a canary, and is not tried again. Revision "+failed)
	}
	for _, changed := range marksOf(plan, semmoev1.AnnotationOutputChanged) {
		e.HeldBack = append(e.HeldBack, "Under it an engine has given other answers than without a plan. Revision "+changed)
	}
	return e
}

// usesPlan tells the roles that a deployment gives a plan from those that the plan has by itself.
func usesPlan(role string) bool { return role != roleTakenBack && role != roleOutputChanged }

// whyOf says the verdict in a sentence.
func whyOf(plan *semmoev1.PlacementPlan) (string, terminal.Tone) {
	forecast, comparison := plan.Status.Forecast, plan.Status.Comparison
	if comparison != nil && comparison.Requests == 0 { // of counts alone no rate is known
		forecast, comparison = nil, nil
	}
	ready := condition(plan.Status.Conditions, semmoev1.ConditionReady)
	switch verdict := plan.Status.Verdict; {
	case verdict == "":
		return fmt.Sprintf("It is not solved yet (%s): %s", ready.Reason, ready.Message), terminal.Busy
	case verdict == semmoev1.VerdictLocalityDoesNotPay:
		return "Locality does not pay at this size of batch: latency dominates the exchange, and not even a rate of 100% would gain what is asked for. Nothing changes", terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && comparison != nil:
		return fmt.Sprintf("It gains too little against the plan in service: %s against %s. Nothing changes", percent(comparison.CandidateLARMilli), percent(comparison.CurrentLARMilli)), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && messages(forecast) != "":
		return "It gains too little: it would have " + messages(forecast), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && forecast != nil && forecast.Reason != "":
		return fmt.Sprintf("It is not rolled out: %s. %s of the activations would stay on their rank, %s do without it", forecast.Reason, percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && slower(forecast):
		return fmt.Sprintf("More would stay on its rank (%s against %s), but a layer is modelled to take %.1f µs against %.1f. Nothing changes", percent(forecast.LARMilli), percent(forecast.BaselineMilli), micros(forecast.LayerNanos), micros(forecast.BaselineLayerNanos)), terminal.Faint
	case verdict == semmoev1.VerdictNoGainExpected && forecast != nil:
		return fmt.Sprintf("It gains too little: %s of the activations would stay on their rank, %s do without it. These requests use all experts alike, or the profile is too small to tell", percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Faint
	case comparison != nil:
		return fmt.Sprintf("It is worth it: on recent requests %s of the activations stay on their rank, under the plan in service %s", percent(comparison.CandidateLARMilli), percent(comparison.CurrentLARMilli)), terminal.Good
	case messages(forecast) != "":
		return "It is worth it: it has " + messages(forecast), terminal.Good
	case forecast != nil && forecast.Reason != "":
		return fmt.Sprintf("It is worth it: %s; %s of the activations stay on their rank, %s do without it", forecast.Reason, percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Good
	case forecast != nil:
		return fmt.Sprintf("It is worth it: %s of the activations stay on their rank, %s do without it", percent(forecast.LARMilli), percent(forecast.BaselineMilli)), terminal.Good
	}
	return fmt.Sprintf("By counts of tokens alone, of which no rates are known, %s", verdictWords[plan.Status.Verdict]), terminal.Plain
}

// messages says on how many ranks a plan has the experts of a token, where tokens are not shuffled; empty elsewhere.
func messages(forecast *semmoev1.PlanForecast) string {
	if forecast == nil || forecast.BaselineRemoteRanksMilli == 0 {
		return ""
	}
	return fmt.Sprintf("the experts of a token on %.2f other ranks, the default placement on %.2f", float64(forecast.RemoteRanksMilli)/1000, float64(forecast.BaselineRemoteRanksMilli)/1000)
}

// slower reports whether a plan makes more local and a layer slower.
func slower(f *semmoev1.PlanForecast) bool {
	return f != nil && f.LARMilli > f.BaselineMilli && f.LayerNanos > f.BaselineLayerNanos
}

func factsOf(plan *semmoev1.PlacementPlan) []Fact {
	facts := []Fact{}
	add := func(name, format string, args ...any) {
		facts = append(facts, Fact{name, fmt.Sprintf(format, args...)})
	}
	spec, status := plan.Spec, plan.Status
	add("Made from", "AffinityProfile %s, for engine %s with attention %s on %s; realisation %s", spec.ProfileRef.Name, spec.Engine, spec.Attention, plural(spec.ExpertParallelSize, "rank"), spec.Realization)
	if said := messages(status.Forecast); said != "" {
		add("It promises", "%s. Tokens are not shuffled: the local activation rate is %s under any plan", said, percent(status.Forecast.LARMilli))
	} else if f := status.Forecast; f != nil {
		bound := ""
		if f.UpperBoundMilli > 0 {
			bound = fmt.Sprintf("; no plan can exceed %s", percent(f.UpperBoundMilli))
		}
		add("It promises", "a local activation rate of %s, on requests that it was not made from; the default placement has %s%s", percent(f.LARMilli), percent(f.BaselineMilli), bound)
		if f.WindowImbalanceMilli > 0 {
			add("Balance", "the busiest rank has %.2f times the mean load, over the last 128 requests", float64(f.WindowImbalanceMilli)/1000)
		}
	}
	if status.RedundantExperts > 0 || spec.ChoosesRedundantExperts() && status.Verdict != "" {
		copies := plural(status.RedundantExperts, "redundant expert") + " in each layer, over all ranks"
		if spec.ChoosesRedundantExperts() {
			copies += ", chosen for " + memoryText(spec.RedundantMemoryBytes) + " per rank"
		}
		add("Copies", "%s", copies)
	}
	if spec.Current != nil {
		add("Compared with", "plan %s, which was in service%s", artifact.Digest(spec.Current.PlanDigest).Short(), comparedOn(status.Comparison))
	} else if status.Verdict != "" {
		add("Compared with", "the default placement, requests in turn")
	}
	if f := status.Forecast; f != nil && f.BaselineLayerNanos > 0 {
		add("Time", "%s", timeText(f.LayerNanos, "in the default placement", f.BaselineLayerNanos, f.Hardware))
		if len(f.BatchTokens) > 0 {
			add("Proof", "saved %.1f%%, 95%% interval %.1f%% to %.1f%%, with %v tokens in a batch", float64(f.SavedMilli)/10, float64(f.SavedLowMilli)/10, float64(f.SavedHighMilli)/10, f.BatchTokens)
		}
		if f.Chosen != "" {
			add("Point of the front", "%s", f.Chosen)
		}
	}
	if c := status.Comparison; c != nil {
		if c.CurrentNanos > 0 {
			add("Time", "%s", timeText(c.CandidateNanos, "under the plan in service", c.CurrentNanos, c.Hardware))
		}
		if c.Reason != "" {
			add("Tier chosen", "%s", c.Reason)
		}
	}
	switch {
	case status.Tier == semmoev1.TierTables:
		add("To bring it in", "request routers swap tables; no pod is restarted, no expert moves")
	case status.Tier == semmoev1.TierLayout && status.Comparison != nil:
		add("To bring it in", "a canary, then all replicas: %s move to another rank", plural(status.Comparison.MovedExperts, "expert"))
	case status.Verdict == semmoev1.VerdictGain:
		add("To bring it in", "a canary, then all replicas: each starts anew under the plan")
	}
	if status.ConfigMap != "" {
		add("Published as", "ConfigMap %s", strings.Join(slices.DeleteFunc([]string{status.ConfigMap, status.StableConfigMap}, func(n string) bool { return n == "" }), " and "))
	}
	return facts
}

// timeText compares the modelled times of an MoE layer under a plan and elsewhere.
func timeText(nanos int64, elsewhere string, nanosThere int64, hardware string) string {
	less, word := 1-float64(nanos)/float64(nanosThere), "less"
	if less < 0 {
		less, word = -less, "more"
	}
	return fmt.Sprintf("an MoE layer is modelled to take %.1f µs, %s %.1f: %.1f%% %s%s", micros(nanos), elsewhere, micros(nanosThere), 100*less, word, modelledBy(hardware))
}

func micros(nanos int64) float64 { return float64(nanos) / 1000 }

// modelledBy names the profile of hardware that times are of; empty where the plan was made by an operator that does not tell.
func modelledBy(hardware string) string {
	if hardware == "" {
		return ""
	}
	return ", by the hardware profile " + hardware
}

func comparedOn(c *semmoev1.PlanComparison) string {
	if c == nil || c.Requests == 0 {
		return ""
	}
	return ", on " + plural(c.Requests, "recent request")
}

// heldBack is why a deployment that wants the plan does not serve it alone; empty where it does, or does not want it.
func heldBack(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) string {
	c := condition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
	short := plan.Status.Plan
	wanted := moed.Status.Plan == plan.Name || short != "" && strings.Contains(c.Message, short)
	if c.Status == metav1.ConditionTrue && !strings.Contains(c.Message, "="+short) || !wanted || short == "" {
		return ""
	}
	return fmt.Sprintf("MoEDeployment %s, %s: %s", moed.Name, c.Reason, c.Message)
}

// Text draws an explanation.
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
		text := terminal.Text{{Text: "Serves: ", Tone: terminal.Faint}, {Text: "MoEDeployment " + use.Deployment}}
		for _, role := range use.Roles {
			text = append(text, terminal.Span{Text: ", "}, roleWords[role])
		}
		line(0, text...)
	}
	if len(e.Serves) == 0 {
		line(0, terminal.Span{Text: "Serves: ", Tone: terminal.Faint}, terminal.Span{Text: "no MoEDeployment"})
	}
	for _, held := range e.HeldBack {
		line(0, terminal.Span{Text: "Held back: ", Tone: terminal.Busy}, terminal.Span{Text: held})
	}
	return out.String()
}
