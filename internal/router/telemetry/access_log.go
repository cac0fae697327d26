// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maxQueued is the number of lines that wait for the writer.
const maxQueued = 1024

// AccessLog writes one JSON line for each of a sample of the requests.
type AccessLog struct {
	percent int
	lines   chan Record
	dropped prometheus.Counter
}

// newAccessLog returns a log of this percentage of the requests. Run writes it.
func newAccessLog(percent int, registry prometheus.Registerer) *AccessLog {
	l := &AccessLog{percent: percent, lines: make(chan Record, maxQueued), dropped: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "semmoe_router_access_log_dropped_total", Help: "Lines of the access log that were dropped because the log was not read fast enough.",
	})}
	registry.MustRegister(l.dropped)
	return l
}

// sampled draws whether a request is logged.
func (l *AccessLog) sampled() bool { return l.percent > 0 && rand.IntN(100) < l.percent }

// add queues a line.
func (l *AccessLog) add(r *Record) {
	select {
	case l.lines <- *r:
	default:
		l.dropped.Inc()
	}
}

// line is a line of the access log.
type line struct {
	Time         time.Time `json:"time"`
	RequestID    string    `json:"requestId"`
	Client       string    `json:"client,omitempty"`
	Method       string    `json:"method"`
	Route        string    `json:"route"`
	Model        string    `json:"model,omitempty"`
	Stream       bool      `json:"stream"`
	Status       int       `json:"status"`
	Seconds      float64   `json:"seconds"`
	Header       float64   `json:"headerSeconds,omitempty"`
	Pod          string    `json:"pod,omitempty"`
	Engine       string    `json:"engine,omitempty"`
	Rank         *int      `json:"rank,omitempty"`
	Plan         string    `json:"plan,omitempty"`
	Retries      int       `json:"retries"`
	Queued       float64   `json:"queuedSeconds,omitempty"`
	Predicted    *float64  `json:"predictedLocality,omitempty"`
	Observed     *float64  `json:"observedLocality,omitempty"`
	PromptTokens int64     `json:"promptTokens,omitempty"`
	OutputTokens int64     `json:"outputTokens,omitempty"`
}

func lineOf(r Record) line {
	l := line{
		Time: r.Started.UTC(), RequestID: r.ID, Client: r.Client, Method: r.Method, Route: r.Route, Model: r.Model, Stream: r.Stream,
		Status: r.Status, Seconds: r.Duration.Seconds(), Header: r.Header.Seconds(), Pod: r.Pod, Engine: r.Engine, Plan: r.Plan,
		Retries: r.Retries, Queued: r.Queued.Seconds(), Predicted: r.Predicted, Observed: r.Observed, PromptTokens: r.PromptTokens, OutputTokens: r.OutputTokens,
	}
	if r.Rank != noRank {
		l.Rank = &r.Rank
	}
	return l
}

// run writes the lines until the context ends, and then those that are queued.
func (l *AccessLog) run(ctx context.Context, to io.Writer) {
	buffer := bufio.NewWriter(to)
	encoder := json.NewEncoder(buffer)
	write := func(r Record) {
		encoder.Encode(lineOf(r)) //nolint:errcheck // a closed log must not end the router
		if len(l.lines) == 0 {
			buffer.Flush() //nolint:errcheck // as above
		}
	}
	for {
		select {
		case r := <-l.lines:
			write(r)
			continue
		case <-ctx.Done():
		}
		for len(l.lines) > 0 {
			write(<-l.lines)
		}
		return
	}
}
