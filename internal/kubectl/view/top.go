// SPDX-License-Identifier: Apache-2.0

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

// RouterMetrics holds the metrics of one request router (docs/metrics.md).
type RouterMetrics struct {
	// Requests, Rate and Predicted are semmoe_observed_requests, semmoe_local_activation_rate and
	// semmoe_predicted_local_activation_rate. Rates are NaN if no request was sampled.
	Requests, Rate, Predicted float64
	// Answered is semmoe_router_requests_total. SavedBytes is semmoe_saved_bytes_per_second, or NaN if it cannot be
	// estimated.
	Answered, SavedBytes float64
	// Tokens, Local and Remote are semmoe_router_estimated_tokens_total and semmoe_activations_total, by rank.
	Tokens, Local, Remote map[string]float64
}

// noRank is the value of the label rank for tokens of requests that were not sent to a specific rank.
const noRank = "none"

// ParseMetrics parses the metrics page of a request router.
func ParseMetrics(text []byte) (RouterMetrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return RouterMetrics{}, fmt.Errorf("metrics: %w", err)
	}
	if families["semmoe_router_requests_total"] == nil {
		return RouterMetrics{}, fmt.Errorf("metrics: semmoe_router_requests_total is missing; the pod is not a request router")
	}
	r := RouterMetrics{Rate: math.NaN(), Predicted: math.NaN(), SavedBytes: math.NaN(), Tokens: map[string]float64{}, Local: map[string]float64{}, Remote: map[string]float64{}}
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

// Load describes the distribution of a deployment's requests over ranks, and their local activation rate.
type Load struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Plan      string `json:"planDigest,omitempty"`
	// Source is routers, or status if the metrics of the routers cannot be read. Routers is the number of routers with
	// readable metrics.
	Source  string `json:"source"`
	Routers int    `json:"routers"`
	// Rate is the local activation rate of the latest sampled requests, or nil without samples. Samples is the number
	// of these requests.
	Rate    *float64 `json:"lar"`
	Samples int64    `json:"samples,omitempty"`
	// Predicted is the forecast rate of these requests. Promised is the rate that the plan promises. Baseline is the
	// rate without a plan.
	Predicted *float64 `json:"forecastLar,omitempty"`
	Promised  *float64 `json:"promisedLar,omitempty"`
	Baseline  *float64 `json:"baselineLar,omitempty"`
	// Requests is the number of requests that were answered since the routers started, or since the previous poll if
	// Recent is true.
	Requests int64 `json:"requests"`
	// SavedBytes is the exchange traffic saved, in bytes per second, or nil if no router can estimate it.
	SavedBytes *float64   `json:"savedBytesPerSecond,omitempty"`
	Recent     bool       `json:"sinceLastLook"`
	Ranks      []RankLoad `json:"ranks"`
	Notes      []string   `json:"notes,omitempty"`
}

// RankLoad is the load of one rank.
type RankLoad struct {
	Rank int `json:"rank"`
	// Share is the rank's share of the tokens. Relative is that share divided by the mean share. Rate is the rank's
	// local activation rate, or nil without samples.
	Share    float64  `json:"share"`
	Relative float64  `json:"overMean"`
	Rate     *float64 `json:"lar"`
}

// Top sums the metrics of a deployment's routers, by pod. before holds the metrics of the previous poll. If a router is
// missing in before, as at the first poll, the figures cover the time since the routers started.
func Top(moed *semmoev1.MoEDeployment, metrics, before map[string]RouterMetrics, notes []string) Load {
	l := Load{Namespace: moed.Namespace, Name: moed.Name, Plan: moed.Status.PlanDigest, Source: "routers", Routers: len(metrics), Notes: notes, Ranks: []RankLoad{}}
	if status := moed.Status.LAR; status != nil {
		l.Promised, l.Baseline = ratio(status.PredictedMilli), ratio(status.BaselineMilli)
	}
	if len(metrics) == 0 {
		l.fromStatus(moed)
		return l
	}
	now := sumOf(metrics)
	since := now
	if l.Recent = among(metrics, before); l.Recent {
		since = now.since(metrics, before)
	}
	l.Rate, l.Predicted, l.Samples = known(now.Rate), known(now.Predicted), int64(now.Requests)
	l.Requests, l.SavedBytes = int64(since.Answered), known(now.SavedBytes)
	if now.rankless(moed.Spec.Parallelism.Attention) {
		l.Notes = append(l.Notes, "Routers send requests to replicas, not to ranks, so the load by rank is unknown.")
		return l
	}
	l.Ranks = since.ranks(int(ranksOf(moed)))
	return l
}

// ranksOf returns the number of ranks of the revision in service. The status lacks it in earlier releases, and before
// the first revision serves. Then the number in the spec is used.
func ranksOf(moed *semmoev1.MoEDeployment) int32 {
	if serving := moed.Status.Serving; serving != nil && serving.Ranks > 0 {
		return serving.Ranks
	}
	return moed.Spec.Parallelism.ExpertParallelSize
}

// rankless reports whether no request was sent to a specific rank. With attention TensorParallel each request uses all
// ranks.
func (r RouterMetrics) rankless(attention semmoev1.AttentionParallelism) bool {
	for rank, tokens := range r.Tokens {
		if rank != noRank && tokens > 0 {
			return false
		}
	}
	return attention == semmoev1.AttentionTensorParallel || r.Tokens[noRank] > 0
}

// ranks returns the load of each rank, given the number of ranks.
func (r RouterMetrics) ranks(ranks int) []RankLoad {
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

// fromStatus fills in the figures of the MoEDeployment's status.
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

// sumOf sums the metrics of routers. Rates are means, weighted by the number of requests.
func sumOf(metrics map[string]RouterMetrics) RouterMetrics {
	sum := RouterMetrics{SavedBytes: math.NaN(), Tokens: map[string]float64{}, Local: map[string]float64{}, Remote: map[string]float64{}}
	var rate, predicted, scored float64
	for _, r := range metrics {
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

// among reports whether before has the metrics of all routers.
func among(metrics, before map[string]RouterMetrics) bool {
	for name := range metrics {
		if _, known := before[name]; !known {
			return false
		}
	}
	return true
}

// since subtracts the counters of the previous poll from the sum r. A router with a decreased counter has restarted and
// counts from zero.
func (r RouterMetrics) since(metrics, before map[string]RouterMetrics) RouterMetrics {
	sum := RouterMetrics{Answered: r.Answered, Tokens: map[string]float64{}, Local: map[string]float64{}, Remote: map[string]float64{}}
	addTo(sum.Tokens, r.Tokens, 1)
	addTo(sum.Local, r.Local, 1)
	addTo(sum.Remote, r.Remote, 1)
	for name, old := range before {
		if current, exists := metrics[name]; exists && current.Answered >= old.Answered {
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

// overloaded is the load relative to the mean above which a rank is highlighted. The target is at most 1.15 fair shares
// per rank.
const overloaded = 1.15

// Text formats a load for a terminal.
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
		period = "since the previous poll"
	}
	if l.Source == "routers" {
		of += fmt.Sprintf("; %s %s", plural(l.Requests, "request"), period)
		if l.SavedBytes != nil && *l.SavedBytes >= 1 {
			of += fmt.Sprintf(", %s/s of exchange traffic saved", bytesText(int64(*l.SavedBytes)))
		}
	}
	out.WriteString(style.Paragraph(append(head, terminal.Span{Text: of}), 0))
	if len(l.Ranks) > 0 {
		var rows [][]terminal.Cell
		for _, rank := range l.Ranks {
			tone := terminal.Plain
			if rank.Relative > overloaded {
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
