// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/test/corpus"
)

// immediateEngine answers every request at once, after reading its body. It replaces the network.
type immediateEngine struct{}

func (immediateEngine) RoundTrip(r *http.Request) (*http.Response, error) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return nil, err
	}
	const answer = `{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`
	header := http.Header{"Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(len(answer))}}
	return &http.Response{
		StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: header,
		ContentLength: int64(len(answer)), Body: io.NopCloser(strings.NewReader(answer)), Request: r,
	}, nil
}

// promptBodies returns distinct requests with prompts of about this number of tokens: words of the corpus in random
// order. chat selects the route with messages.
func promptBodies(n, tokens int, chat bool) [][]byte {
	var words []string
	for _, document := range corpus.Written() {
		switch document.Kind {
		case "english", "python", "c", "rust", "sql":
			words = append(words, strings.SplitAfter(document.Text, " ")...)
		}
	}
	random := rand.New(rand.NewPCG(uint64(tokens), 1))
	bodies := make([][]byte, n)
	for i := range bodies {
		var text strings.Builder
		for text.Len() < 4*tokens {
			text.WriteString(words[random.IntN(len(words))])
		}
		if bodies[i] = fmt.Appendf(nil, `{"model":"m","prompt":%s,"max_tokens":16,"temperature":0}`, strconv.Quote(text.String())); chat {
			bodies[i] = fmt.Appendf(nil, `{"model":"m","messages":[{"role":"user","content":%s}],"max_tokens":16}`, strconv.Quote(text.String()))
		}
		bodies[i] = bytes.ReplaceAll(bodies[i], []byte(`\x`), []byte(`\u00`))
	}
	return bodies
}

func processorTime(b *testing.B) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkRequest sends bodies through the handler of the proxy to an engine that answers at once, without a network.
// It reports the processor time per request, which other programs on the machine disturb less than the wall time.
func BenchmarkRequest(b *testing.B) {
	p, _ := solved(b)
	for _, mode := range []struct {
		name   string
		plan   string
		policy dispatch.Policy
	}{{"predicted", p.Artifact.Digest, dispatch.Price}, {"unpredicted", "", dispatch.Price}, {"round-robin", "", dispatch.RoundRobin}} {
		for _, tokens := range []int{100, 1000, 8000} {
			b.Run(fmt.Sprintf("%s/tokens=%d", mode.name, tokens), func(b *testing.B) {
				options := DefaultPoolOptions()
				options.Policy = mode.policy
				pool, err := NewPoolWith(options)
				if err != nil {
					b.Fatal(err)
				}
				pool.Set(backendsOf(mode.plan, 4, 4, "p"))
				pool.AddLayout(p.layout)
				handler := newBenchmarkProxy(pool, immediateEngine{})
				bodies := promptBodies(64, tokens, false)
				i := 0
				b.ReportAllocs()
				begin := processorTime(b)
				for b.Loop() {
					request := httptest.NewRequest(http.MethodPost, "/v1/completions", bytes.NewReader(bodies[i%len(bodies)]))
					recorder := httptest.NewRecorder()
					handler.ServeHTTP(recorder, request)
					if predicted := recorder.Header().Get(HeaderPlan) != ""; recorder.Code != http.StatusOK || predicted != (mode.plan != "") {
						b.Fatalf("code %d, predicted %v", recorder.Code, predicted)
					}
					i++
				}
				b.ReportMetric(float64((processorTime(b)-begin).Microseconds())/float64(b.N), "cpu-us/op")
			})
		}
	}
}

// BenchmarkPick picks endpoints for requests of a gateway under a plan, without the messages of the gateway.
func BenchmarkPick(b *testing.B) {
	p, _ := solved(b)
	for _, tokens := range []int{100, 1000, 8000} {
		b.Run(fmt.Sprintf("tokens=%d", tokens), func(b *testing.B) {
			pool, err := NewPoolWith(DefaultPoolOptions())
			if err != nil {
				b.Fatal(err)
			}
			pool.Set(backendsOf(p.Artifact.Digest, 4, 4, "p"))
			pool.AddLayout(p.layout)
			chooser, _ := NewEndpointPicker(pool, prometheus.NewRegistry(), ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20}, 1)
			bodies := promptBodies(64, tokens, true)
			i := 0
			b.ReportAllocs()
			begin := processorTime(b)
			for b.Loop() {
				exchange, err := chooser.Pick(b.Context(), &picker.Request{
					Method: http.MethodPost, Path: "/v1/chat/completions", Header: http.Header{}, Body: bodies[i%len(bodies)], Arrived: time.Now(),
				})
				if err != nil {
					b.Fatal(err)
				}
				exchange.Release()
				i++
			}
			b.ReportMetric(float64((processorTime(b)-begin).Microseconds())/float64(b.N), "cpu-us/op")
		})
	}
}

func newBenchmarkProxy(pool *Pool, engine http.RoundTripper) http.Handler {
	options := ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 20, EndpointWait: time.Second}
	s := newStages(pool, prometheus.NewRegistry(), options)
	s.writer.transport = engine
	return newProxyHandler(s, options, logr.Discard())
}
