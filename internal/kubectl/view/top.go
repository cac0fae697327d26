package view

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// Routed is what the metrics of one request router tell (docs/metrics.md).
type Routed struct {
	// Requests, Rate and Predicted are semmoe_observed_requests, semmoe_local_activation_rate and
	// semmoe_predicted_local_activation_rate; rates are NaN where nothing was sampled.
	Requests, Rate, Predicted float64
	// Answered is semmoe_router_requests_total, SavedBytes semmoe_saved_bytes_per_second, NaN where it cannot be estimated.
	Answered, SavedBytes float64
	// Tokens, Local and Remote are semmoe_router_estimated_tokens_total and semmoe_activations_total, by rank.
	Tokens, Local, Remote map[string]float64
}

// noRank is the rank of tokens that were sent to none.
const noRank = "none"

// ParseMetrics reads the metrics of a request router.
func ParseMetrics(text []byte) (Routed, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return Routed{}, fmt.Errorf("metrics: %w", err)
	}
	if families["semmoe_router_requests_total"] == nil {
		return Routed{}, fmt.Errorf("metrics: there is no semmoe_router_requests_total: this is no request router")
	}
	r := Routed{Rate: math.NaN(), Predicted: math.NaN(), SavedBytes: math.NaN(), Tokens: map[string]float64{}, Local: map[string]float64{}, Remote: map[string]float64{}}
	for name, into := range map[string]*float64{
		"semmoe_observed_requests": &r.Requests, "semmoe_local_activation_rate": &r.Rate, "semmoe_predicted_local_activation_rate": &r.Predicted,
		"semmoe_saved_bytes_per_second": &r.SavedBytes,
	} {
		for _, metric := range families[name].GetMetric() {
			*into = metric.GetGauge().GetValue()
		}
	}
	for _, metric := range families["semmoe_router_requests_total"].GetMetric() {
		r.Answered += metric.GetCounter().GetValue()
	}
	for _, metric := range families["semmoe_router_estimated_tokens_total"].GetMetric() {
		r.Tokens[label(metric, "rank")] += metric.GetCounter().GetValue()
	}
	for _, metric := range families["semmoe_activations_total"].GetMetric() {
		into := r.Remote
		if label(metric, "locality") == "local" {
			into = r.Local
		}
		into[label(metric, "rank")] += metric.GetCounter().GetValue()
	}
	return r, nil
}

func label(metric *dto.Metric, name string) string {
	for _, pair := range metric.GetLabel() {
		if pair.GetName() == name {
			return pair.GetValue()
		}
	}
	return ""
}

// Load is how the requests of a deployment are spread, and how much of them stays local.
type Load struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Plan      string `json:"planDigest,omitempty"`
	// Source is routers, or status where their metrics may not be read; Routers is how many of them have told.
	Source  string `json:"source"`
	Routers int    `json:"routers"`
	// Rate is the local activation rate of the last sampled requests, Samples their number; nil where none were sampled.
	Rate    *float64 `json:"lar"`
	Samples int64    `json:"samples,omitempty"`
	// Predicted is what the forecasts of these requests say, Promised what the plan promises, Baseline the rate without a plan.
	Predicted *float64 `json:"forecastLar,omitempty"`
	Promised  *float64 `json:"promisedLar,omitempty"`
	Baseline  *float64 `json:"baselineLar,omitempty"`
	// Requests were answered since the routers started, or, where Recent, since the look before.
	Requests int64 `json:"requests"`
	// SavedBytes need not be exchanged in a second; nil where no router can estimate it.
	SavedBytes *float64   `json:"savedBytesPerSecond,omitempty"`
	Recent     bool       `json:"sinceLastLook"`
	Ranks      []RankLoad `json:"ranks"`
	Notes      []string   `json:"notes,omitempty"`
}

// RankLoad is one rank's part.
type RankLoad struct {
	Rank int `json:"rank"`
	// Share is its share of the tokens, Relative the same over the mean; Rate is its local activation rate, nil without a sample.
	Share    float64  `json:"share"`
	Relative float64  `json:"overMean"`
	Rate     *float64 `json:"lar"`
}

// Top sums what routers tell of a deployment. before is what they told before, by pod; where one of them is not in it, as at the first look,
// what has come since is not known.
func Top(moed *semmoev1.MoEDeployment, told, before map[string]Routed, notes []string) Load {
	l := Load{Namespace: moed.Namespace, Name: moed.Name, Plan: moed.Status.PlanDigest, Source: "routers", Routers: len(told), Notes: notes, Ranks: []RankLoad{}}
	if status := moed.Status.LAR; status != nil {
		l.Promised, l.Baseline = ratio(status.PredictedMilli), ratio(status.BaselineMilli)
	}
	if len(told) == 0 {
		l.fromStatus(moed)
		return l
	}
	now := sumOf(told)
	since := now
	if l.Recent = among(told, before); l.Recent {
		since = now.since(told, before)
	}
	l.Rate, l.Predicted, l.Samples = known(now.Rate), known(now.Predicted), int64(now.Requests)
	l.Requests, l.SavedBytes = int64(since.Answered), known(now.SavedBytes)
	if now.rankless(moed.Spec.Parallelism.Attention) {
		l.Notes = append(l.Notes, "Requests have no rank here: routers send them to replicas as a whole, and no load by rank is known.")
		return l
	}
	l.Ranks = since.ranks(int(ranksOf(moed)))
	return l
}

// ranksOf is the number of ranks of what serves. An operator of an earlier release does not report it, nor does one that has started
// nothing.
func ranksOf(moed *semmoev1.MoEDeployment) int32 {
	if serving := moed.Status.Serving; serving != nil && serving.Ranks > 0 {
		return serving.Ranks
	}
	return moed.Spec.Parallelism.ExpertParallelSize
}

// rankless tells that requests are sent to no rank: with attention TensorParallel each is of all ranks.
func (r Routed) rankless(attention semmoev1.AttentionParallelism) bool {
	for rank, tokens := range r.Tokens {
		if rank != noRank && tokens > 0 {
			return false
		}
	}
	return attention == semmoev1.AttentionTensorParallel || r.Tokens[noRank] > 0
}

// ranks are the parts of so many ranks.
func (r Routed) ranks(ranks int) []RankLoad {
	loads, total := []RankLoad{}, 0.0
	for rank := range ranks {
		total += r.Tokens[strconv.Itoa(rank)]
	}
	for rank := range ranks {
		key := strconv.Itoa(rank)
		load := RankLoad{Rank: rank}
		if total > 0 {
			load.Share, load.Relative = r.Tokens[key]/total, r.Tokens[key]/total*float64(ranks)
		}
		if sampled := r.Local[key] + r.Remote[key]; sampled > 0 {
			load.Rate = known(r.Local[key] / sampled)
		}
		loads = append(loads, load)
	}
	return loads
}

// fromStatus takes what the operator reported last.
func (l *Load) fromStatus(moed *semmoev1.MoEDeployment) {
	l.Source = "status"
	if moed.Status.LAR != nil {
		l.Rate = ratio(moed.Status.LAR.ObservedMilli)
	}
	if routing := moed.Status.Routing; routing != nil {
		for _, rank := range routing.Ranks {
			share := float64(rank.ShareMilli) / 1000
			l.Ranks = append(l.Ranks, RankLoad{Rank: int(rank.Rank), Share: share, Relative: share * float64(len(routing.Ranks))})
		}
	}
}

// sumOf sums routers; rates are means, weighed by the requests that they are of.
func sumOf(told map[string]Routed) Routed {
	sum := Routed{SavedBytes: math.NaN(), Tokens: map[string]float64{}, Local: map[string]float64{}, Remote: map[string]float64{}}
	var rate, predicted, scored float64
	for _, r := range told {
		sum.Answered += r.Answered
		switch {
		case math.IsNaN(sum.SavedBytes):
			sum.SavedBytes = r.SavedBytes
		case !math.IsNaN(r.SavedBytes):
			sum.SavedBytes += r.SavedBytes
		}
		if !math.IsNaN(r.Rate) {
			sum.Requests, rate = sum.Requests+r.Requests, rate+r.Requests*r.Rate
		}
		if !math.IsNaN(r.Predicted) {
			scored, predicted = scored+r.Requests, predicted+r.Requests*r.Predicted
		}
		addTo(sum.Tokens, r.Tokens, 1)
		addTo(sum.Local, r.Local, 1)
		addTo(sum.Remote, r.Remote, 1)
	}
	sum.Rate, sum.Predicted = rate/sum.Requests, predicted/scored // NaN without a request
	return sum
}

// among reports whether all that tell are among those that told before.
func among(told, before map[string]Routed) bool {
	for name := range told {
		if _, known := before[name]; !known {
			return false
		}
	}
	return true
}

// since is what has come since the look before. A router that has started anew counts from its start.
func (r Routed) since(told, before map[string]Routed) Routed {
	sum := Routed{Answered: r.Answered, Tokens: map[string]float64{}, Local: map[string]float64{}, Remote: map[string]float64{}}
	addTo(sum.Tokens, r.Tokens, 1)
	addTo(sum.Local, r.Local, 1)
	addTo(sum.Remote, r.Remote, 1)
	for name, old := range before {
		if current, there := told[name]; there && current.Answered >= old.Answered {
			sum.Answered -= old.Answered
			addTo(sum.Tokens, old.Tokens, -1)
			addTo(sum.Local, old.Local, -1)
			addTo(sum.Remote, old.Remote, -1)
		}
	}
	return sum
}

func addTo(sum, more map[string]float64, sign float64) {
	for key, value := range more {
		sum[key] += sign * value
	}
}

func ratio(milli *int32) *float64 {
	if milli == nil {
		return nil
	}
	return known(float64(*milli) / 1000)
}

func known(value float64) *float64 {
	if math.IsNaN(value) {
		return nil
	}
	return &value
}

func share(value *float64) string {
	if value == nil {
		return "unknown"
	}
	return fmt.Sprintf("%.1f%%", 100**value)
}

// crowded is the load over the mean from which a rank is told apart: no rank is to exceed 1.15 fair shares.
const crowded = 1.15

// Text draws a load.
func (l Load) Text(style terminal.Style) string {
	var out strings.Builder
	head := terminal.Text{{Text: "MoEDeployment ", Tone: terminal.Faint}, {Text: l.Namespace + "/" + l.Name, Tone: terminal.Strong}, {Text: ": LAR "}, {Text: share(l.Rate), Tone: terminal.Strong}}
	of := ""
	if l.Samples > 0 {
		of = " of the last " + plural(l.Samples, "sampled request")
	}
	optional := func(name string, value *float64) string {
		if value == nil {
			return ""
		}
		return name + " " + share(value)
	}
	figures := list(optional("promised", l.Promised), optional("forecast", l.Predicted), optional("without a plan", l.Baseline))
	if figures != "" {
		of += " (" + figures + ")"
	}
	period := "since the routers started"
	if l.Recent {
		period = "since the last look"
	}
	if l.Source == "routers" {
		of += fmt.Sprintf("; %s %s", plural(l.Requests, "request"), period)
		if l.SavedBytes != nil && *l.SavedBytes >= 1 {
			of += fmt.Sprintf(", %s/s need not be exchanged", bytesText(int64(*l.SavedBytes)))
		}
	}
	out.WriteString(style.Paragraph(append(head, terminal.Span{Text: of}), 0))
	if len(l.Ranks) > 0 {
		var rows [][]terminal.Cell
		for _, rank := range l.Ranks {
			tone := terminal.Plain
			if rank.Relative > crowded {
				tone = terminal.Busy
			}
			rows = append(rows, []terminal.Cell{
				{Text: strconv.Itoa(rank.Rank)}, {Text: share(rank.Rate)}, {Text: fmt.Sprintf("%.1f%%", 100*rank.Share)},
				{Text: fmt.Sprintf("%.2f", rank.Relative), Tone: tone}, {Text: bar(rank.Relative / 2), Tone: tone},
			})
		}
		out.WriteString(style.Table([]string{"RANK", "LAR", "LOAD", "× MEAN", "LOAD BAR"}, rows))
	}
	for _, note := range l.Notes {
		out.WriteString(style.Paragraph(terminal.Words(note, terminal.Faint), 0))
	}
	return out.String()
}
