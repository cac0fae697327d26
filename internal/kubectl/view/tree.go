// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// Tree draws a deployment and the objects that belong to it.
func (d Deployment) Tree(style terminal.Style) string {
	root := &terminal.Node{Text: d.headline()}
	shown := map[string]bool{}
	for _, job := range d.Jobs {
		if job.Profile == "" && job.State != "Complete" {
			root.Add(job.text(d))
		}
	}
	for _, profile := range d.Profiles {
		node := root.Add(profile.text())
		for _, job := range d.Jobs {
			if job.Profile == profile.Name && job.State != "Complete" && !profile.Ready {
				node.Add(job.text(d))
			}
		}
		for _, plan := range d.Plans {
			if plan.Profile == profile.Name {
				shown[plan.Name] = true
				node.Add(plan.text())
			}
		}
	}
	for _, plan := range d.Plans {
		if !shown[plan.Name] {
			root.Add(plan.text())
		}
	}
	for _, revision := range d.Revisions {
		node := root.Add(revision.text(d))
		for _, pod := range revision.Pods {
			node.Add(pod.text(d))
		}
	}
	if d.Routers != nil {
		node := root.Add(d.Routers.text())
		for _, pod := range d.Routers.Pods {
			node.Add(pod.text(d))
		}
	}
	for _, missing := range d.NotRead {
		root.Add(terminal.Words("Not shown: "+missing, terminal.Faint))
	}
	return style.Tree(root)
}

// headline returns the first line: state, replicas, plan, locality, drift and pause.
func (d Deployment) headline() terminal.Text {
	text := terminal.Text{{Text: "MoEDeployment ", Tone: terminal.Faint}, {Text: d.Namespace + "/" + d.Name, Tone: terminal.Strong}, {Text: ": "}}
	state := "Ready"
	if d.Ready.Status != metav1.ConditionTrue {
		state = d.Ready.Reason
	}
	text = append(text, terminal.Span{Text: state, Tone: toneOf(d.Ready)})
	more := list(fmt.Sprintf("%d/%d replicas", d.Replicas.Ready, d.Replicas.Desired), d.planText(), d.localityText())
	text = append(text, terminal.Span{Text: ", " + more})
	if d.Drift != nil && d.Drift.Since != nil {
		text = append(text, terminal.Span{Text: ", "}, terminal.Span{Text: "drifted for " + ago(d.Drift.Since.Time, d.now), Tone: terminal.Busy})
	}
	if d.Paused {
		text = append(text, terminal.Span{Text: ", "}, terminal.Span{Text: "paused", Tone: terminal.Busy})
	}
	return text
}

func (d Deployment) planText() string {
	if d.Plan == "" {
		return "no plan"
	}
	return "plan " + d.Plan
}

// localityText returns the observed local activation rate, with the promised and the baseline rate. It is empty if all
// are unknown.
func (d Deployment) localityText() string {
	l := d.Locality
	if l == nil {
		return ""
	}
	var references []string
	if l.PredictedMilli != nil {
		references = append(references, "promised "+percent(*l.PredictedMilli))
	}
	if l.BaselineMilli != nil {
		references = append(references, "without a plan "+percent(*l.BaselineMilli))
	}
	if l.ObservedMilli == nil && len(references) == 0 {
		return ""
	}
	observed := "not observed"
	if l.ObservedMilli != nil {
		observed = percent(*l.ObservedMilli)
	}
	if len(references) == 0 {
		return "LAR " + observed
	}
	return fmt.Sprintf("LAR %s (%s)", observed, strings.Join(references, ", "))
}

func (p Profile) text() terminal.Text {
	text := terminal.Text{{Text: "AffinityProfile ", Tone: terminal.Faint}, {Text: p.Name + ": "}}
	tone := terminal.Busy
	if p.Ready {
		tone = terminal.Good
	}
	text = append(text, terminal.Span{Text: p.State, Tone: tone})
	switch {
	case p.Ready && p.Result != nil:
		text = append(text, terminal.Span{Text: ", " + sizeText(p.Result)})
	case !p.Ready && p.Progress != nil && p.Progress.RequestsTotal > 0:
		text = append(text, terminal.Span{Text: ", " + progressText(p.Progress)})
	case !p.Ready:
		text = append(text, terminal.Span{Text: ": " + p.Message})
	}
	return append(text, driftedText(p.Drifted)...)
}

// sizeText returns the number of tokens and requests of a profile. A profile that was made only from counts has no
// number of requests.
func sizeText(result *semmoev1.ProfileResult) string {
	if result.Requests == 0 {
		return plural(result.Tokens, "token")
	}
	return fmt.Sprintf("%s of %s", plural(result.Tokens, "token"), plural(result.Requests, "request"))
}

// progressText returns the progress of a profile as a bar, a rate and the remaining time.
func progressText(p *semmoev1.ProfileProgress) string {
	text := fmt.Sprintf("%s %d/%d", bar(float64(p.RequestsDone)/float64(p.RequestsTotal)), p.RequestsDone, p.RequestsTotal)
	if p.TokensPerSecond > 0 {
		text += fmt.Sprintf(", %d tokens/s", p.TokensPerSecond)
	}
	if p.RemainingSeconds > 0 {
		text += fmt.Sprintf(", about %ds left", p.RemainingSeconds)
	}
	return text
}

func driftedText(drifted bool) terminal.Text {
	if !drifted {
		return nil
	}
	return terminal.Text{{Text: ", made for drifted traffic", Tone: terminal.Faint}}
}

// roleLabels are the display texts of plan roles.
var roleLabels = map[string]terminal.Span{
	roleInService:     {Text: "in service", Tone: terminal.Good},
	roleCandidate:     {Text: "being rolled out", Tone: terminal.Busy},
	roleWanted:        {Text: "to be rolled out", Tone: terminal.Busy},
	rolePinned:        {Text: "pinned", Tone: terminal.Strong},
	roleTakenBack:     {Text: "rolled back", Tone: terminal.Bad},
	roleOutputChanged: {Text: "changes outputs", Tone: terminal.Bad},
}

func (p Plan) text() terminal.Text {
	text := terminal.Text{{Text: "PlacementPlan ", Tone: terminal.Faint}, {Text: p.Name + ": "}}
	if !p.Ready && p.Digest == "" {
		text = append(text, terminal.Span{Text: p.State, Tone: terminal.Busy}, terminal.Span{Text: ": " + p.Message})
		return append(text, driftedText(p.Drifted)...)
	}
	text = append(text, terminal.Span{Text: "plan " + p.Digest})
	worthless := p.Verdict != "" && p.Verdict != semmoev1.VerdictGain
	for _, role := range p.Roles {
		if word, known := roleLabels[role]; known && !(role == roleWanted && (worthless || len(p.Roles) > 1)) {
			text = append(text, terminal.Span{Text: ", "}, word)
		}
	}
	if p.Tier == semmoev1.TierTables {
		text = append(text, terminal.Span{Text: ", only new tables"})
	}
	if worthless {
		text = append(text, terminal.Span{Text: ", "}, terminal.Span{Text: verdictLabels[p.Verdict], Tone: terminal.Faint})
	}
	if p.Forecast != nil {
		text = append(text, terminal.Span{Text: fmt.Sprintf(", promises LAR %s (without a plan %s)", percent(p.Forecast.LARMilli), percent(p.Forecast.BaselineMilli))})
	}
	return append(text, driftedText(p.Drifted)...)
}

// verdictLabels are the display texts of verdicts.
var verdictLabels = map[semmoev1.Verdict]string{
	semmoev1.VerdictGain:               "a gain is expected",
	semmoev1.VerdictNoGainExpected:     "no gain is expected",
	semmoev1.VerdictLocalityDoesNotPay: "locality does not pay at this batch size",
}

// stageLabels are the display texts of revision stages.
var stageLabels = map[string]terminal.Span{
	stageInService:   {Text: "in service", Tone: terminal.Good},
	stageStarting:    {Text: "starting", Tone: terminal.Busy},
	stageCanary:      {Text: "canary", Tone: terminal.Busy},
	stagePromoting:   {Text: "being promoted", Tone: terminal.Busy},
	stageRollingBack: {Text: "being rolled back", Tone: terminal.Bad},
	stageRetired:     {Text: "retired", Tone: terminal.Faint},
}

func (r Revision) text(d Deployment) terminal.Text {
	plan := "without a plan"
	if r.Plan != "" {
		plan = "with plan " + r.Plan
	}
	text := terminal.Text{
		{Text: "Revision ", Tone: terminal.Faint}, {Text: r.Name + ": "}, stageLabels[r.Stage],
		{Text: fmt.Sprintf(", %s, %d/%d ready", plan, r.Replicas.Ready, r.Replicas.Desired)},
	}
	if d.Rollout != nil && d.Rollout.CandidateRevision == r.Name {
		text = append(text, terminal.Span{Text: fmt.Sprintf(", for %s. %s", ago(d.Rollout.Since.Time, d.now), d.Rollout.Message)})
	}
	return text
}

func (p Pod) text(d Deployment) terminal.Text {
	tone := terminal.Busy
	if p.Ready {
		tone = terminal.Good
	} else if p.Message != "" {
		tone = terminal.Bad
	}
	text := terminal.Text{{Text: "Pod ", Tone: terminal.Faint}, {Text: p.Name + ": "}, {Text: p.State, Tone: tone}}
	if p.Workers > 0 {
		text = append(text, terminal.Span{Text: fmt.Sprintf(", %d/%d worker pods ready", p.WorkersReady, p.Workers)})
	}
	if p.Restarts > 0 {
		text = append(text, terminal.Span{Text: ", " + plural(p.Restarts, "restart")})
	}
	text = append(text, terminal.Span{Text: ", " + ago(p.Since, d.now), Tone: terminal.Faint})
	if p.Message != "" {
		text = append(text, terminal.Span{Text: ". " + p.Message})
	}
	return text
}

func (r Routers) text() terminal.Text {
	tone := terminal.Good
	if r.Replicas.Ready < r.Replicas.Desired {
		tone = terminal.Busy
	}
	return terminal.Text{{Text: "Request routers ", Tone: terminal.Faint}, {Text: r.Name + ": "}, {Text: fmt.Sprintf("%d/%d ready", r.Replicas.Ready, r.Replicas.Desired), Tone: tone}}
}

func (j Job) text(d Deployment) terminal.Text {
	tone := terminal.Busy
	if j.State == "Failed" {
		tone = terminal.Bad
	}
	text := terminal.Text{{Text: "Job ", Tone: terminal.Faint}, {Text: j.Name + ": "}, {Text: j.State, Tone: tone}, {Text: ", " + ago(j.Since, d.now), Tone: terminal.Faint}}
	if j.Message != "" {
		text = append(text, terminal.Span{Text: ". " + j.Message})
	}
	return text
}

// Details draws the conditions of a deployment.
func (d Deployment) Details(style terminal.Style) string {
	var rows [][]terminal.Cell
	for _, c := range d.Conditions {
		rows = append(rows, []terminal.Cell{
			{Text: c.Type}, {Text: string(c.Status), Tone: toneOf(c)}, {Text: c.Reason},
			{Text: ago(c.LastTransitionTime.Time, d.now), Tone: terminal.Faint}, {Text: c.Message},
		})
	}
	var out strings.Builder
	if len(rows) > 0 {
		out.WriteString(style.Table([]string{"CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"}, rows))
	} else {
		out.WriteString(style.Paragraph(terminal.Words("The operator has not reconciled it yet. Check that the operator is running.", terminal.Busy), 0))
	}
	return out.String()
}

// Hints draws the commands that the deployment waits for.
func (d Deployment) Hints(style terminal.Style) string {
	var out strings.Builder
	for _, step := range d.Next {
		out.WriteString(style.Paragraph(terminal.Text{{Text: step.Command, Tone: terminal.Strong}, {Text: "  " + step.Why, Tone: terminal.Plain}}, 2))
	}
	if out.Len() > 0 {
		return "Waiting for:\n" + out.String()
	}
	return ""
}
