// SPDX-License-Identifier: Apache-2.0

package reports

import (
	"math"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
)

// Collector computes metrics from a report at each scrape. The labels are the ranks of one replica and at most four
// layer groups. A value without observations is NaN.
type Collector struct {
	// Report is called for each scrape.
	Report func() lar.Report
	// Covered returns the time span that the buckets of the report's window cover.
	Covered func() time.Duration
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

const lastHelp = " in the last sampled requests (at most 1024)"

var (
	rateMetric        = describe("semmoe_local_activation_rate", "Local activations divided by all activations"+lastHelp+".")
	rateErrorMetric   = describe("semmoe_local_activation_rate_standard_error", "Standard error of semmoe_local_activation_rate, for a random sample of requests.")
	rankRateMetric    = describe("semmoe_rank_local_activation_rate", "Local activations divided by all activations, by serving rank,"+lastHelp+".", "rank")
	groupRateMetric   = describe("semmoe_layer_group_local_activation_rate", "Local activations divided by all activations, by group of consecutive MoE layers (group 0 has the first layers),"+lastHelp+".", "group")
	predictedMetric   = describe("semmoe_predicted_local_activation_rate", "Local activation rate that plans forecast for the scored requests among the last sampled requests (at most 1024).")
	biasMetric        = describe("semmoe_forecast_bias", "Observed minus forecast local activation rate"+lastHelp+".")
	biasErrorMetric   = describe("semmoe_forecast_bias_standard_error", "Standard error of semmoe_forecast_bias.")
	slopeMetric       = describe("semmoe_forecast_slope", "Slope of the observed local share of a request over its forecast share"+lastHelp+"; 1 for exact forecasts.")
	slopeErrorMetric  = describe("semmoe_forecast_slope_standard_error", "Standard error of semmoe_forecast_slope.")
	remoteRanksMetric = describe("semmoe_remote_ranks_per_token", "Mean number of other ranks that hold experts of a token, over MoE layers,"+lastHelp+".")
	requestsMetric    = describe("semmoe_observed_requests", "Number of requests that the observed rates cover (at most 1024).")
	savedMetric       = describe("semmoe_saved_bytes_per_second", "Estimated bytes that ranks do not exchange because more activations are local than with an even spread of experts, over the last 2 minutes.")
	eligibleMetric    = describe("semmoe_sample_eligible_requests_total", "Answered requests that were eligible for sampling.")
	sampledMetric     = describe("semmoe_sampled_requests_total", "Answered requests that were sampled.")
	streamedMetric    = describe("semmoe_sample_streamed_requests_total", "Answered requests that could not be sampled because the engine does not return the routed experts of streams.")
	longMetric        = describe("semmoe_sample_long_requests_total", "Answered requests that were not sampled because the routed experts of such a long request would take too much memory.")
	costMetric        = describe("semmoe_capture_cost_ratio", "Time per token of sampled requests divided by that of other requests on the same pods, in the last hour; NaN with fewer than 100 of either.")
	costErrorMetric   = describe("semmoe_capture_cost_ratio_standard_error", "Standard error of semmoe_capture_cost_ratio.")
	narrowedMetric    = describe("semmoe_sampling_narrowed", "1 if only one pod of each plan is sampled because capture costs too much, 0 if not.")
)

// Describe implements prometheus.Collector.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, metric := range []*prometheus.Desc{
		rateMetric, rateErrorMetric, rankRateMetric, groupRateMetric, predictedMetric,
		biasMetric, biasErrorMetric, slopeMetric, slopeErrorMetric, remoteRanksMetric,
		requestsMetric, savedMetric, eligibleMetric, sampledMetric, streamedMetric, longMetric,
		costMetric, costErrorMetric, narrowedMetric,
	} {
		to <- metric
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	report := c.Report()
	gauge := func(metric *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(metric, prometheus.GaugeValue, value, labels...)
	}
	counter := func(metric *prometheus.Desc, value int64) {
		to <- prometheus.MustNewConstMetric(metric, prometheus.CounterValue, float64(value))
	}
	last := report.Last.All()
	gauge(rateMetric, last.Overall.Value())
	gauge(rateErrorMetric, last.Overall.StandardError())
	gauge(requestsMetric, float64(last.Overall.Requests))
	gauge(remoteRanksMetric, last.RemoteRanksPerToken())
	for rank, ratio := range last.Ranks {
		gauge(rankRateMetric, ratio.Value(), strconv.Itoa(rank))
	}
	for group, ratio := range last.LayerGroups {
		gauge(groupRateMetric, ratio.Value(), strconv.Itoa(group))
	}
	gauge(predictedMetric, last.Forecast.Predicted())
	pair := func(metric, errorMetric *prometheus.Desc, value, standardError float64) {
		gauge(metric, value)
		gauge(errorMetric, standardError)
	}
	bias, biasError := last.Forecast.Bias()
	pair(biasMetric, biasErrorMetric, bias, biasError)
	slope, slopeError := last.Forecast.Slope()
	pair(slopeMetric, slopeErrorMetric, slope, slopeError)
	gauge(savedMetric, lar.SavedBytesPerSecond(report.Window, c.Covered()))
	cost, costError := math.NaN(), math.NaN()
	if report.CaptureCost != nil {
		if ratio, standardError, known := report.CaptureCost.Ratio(); known {
			cost, costError = ratio, standardError
		}
	}
	pair(costMetric, costErrorMetric, cost, costError)
	narrowed := 0.
	if report.Population.Replicas == lar.ReplicasOne {
		narrowed = 1
	}
	gauge(narrowedMetric, narrowed)
	counter(eligibleMetric, report.Population.Eligible)
	counter(sampledMetric, report.Population.Sampled)
	counter(streamedMetric, report.Population.Streamed)
	counter(longMetric, report.Population.Long)
}
