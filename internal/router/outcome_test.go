// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

// testClock is a clock that the test advances.
type testClock struct{ nanoseconds atomic.Int64 }

var clockStart = time.Unix(1_700_000_000, 0)

func (c *testClock) now() time.Time       { return clockStart.Add(time.Duration(c.nanoseconds.Load())) }
func (c *testClock) pass(seconds float64) { c.nanoseconds.Add(int64(seconds * float64(time.Second))) }
func of(seconds ...float64) (m lar.Moments) {
	for _, s := range seconds {
		m.Add(s)
	}
	return m
}

// servedBy returns the reported sums by revision, without covariates.
func servedBy(t *testing.T, o *Observations) map[string]lar.Service {
	t.Helper()
	sums := servedWithCovariates(t, o)
	for revision, s := range sums {
		for _, m := range []*lar.Moments{&s.FirstToken, &s.InterToken, &s.Answer} {
			m.Covariates = lar.CovariateSums{}
		}
		sums[revision] = s
	}
	return sums
}

// servedWithCovariates returns the reported sums by revision.
func servedWithCovariates(t *testing.T, o *Observations) map[string]lar.Service {
	t.Helper()
	sums := map[string]lar.Service{}
	for _, bucket := range reported(t, o).Service {
		for revision, served := range bucket.Revisions {
			sum := sums[revision]
			sum.Merge(served)
			sums[revision] = sum
		}
	}
	return sums
}

// TestCountsOutcomes checks that each pod that gets a request is rated by its status, by broken responses, and by the
// time to the first event, between events, or of the complete response.
func TestCountsOutcomes(t *testing.T) {
	const stream, whole = "text/event-stream", "application/json"
	answers := func(kind string, pieces ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", kind)
			for _, piece := range pieces {
				io.WriteString(w, piece) //nolint:errcheck // the client verifies the body
				w.(http.Flusher).Flush()
			}
		}
	}
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
	}
	breaks := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", stream)
		io.WriteString(w, "data: 1\n\n") //nolint:errcheck // the client verifies the body
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	refuses := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	one := func(change func(*lar.Service)) lar.Service {
		s := lar.Service{Requests: 1}
		change(&s)
		return s
	}
	failed := lar.Service{Requests: 1, Failures: 1}
	type revisions = map[string]lar.Service
	for name, tc := range map[string]struct {
		path          string
		first, second http.HandlerFunc // handlers of revision a, and of b, which is tried second
		want          revisions
	}{
		"in one piece":            {"/v1/completions", answers(whole, "{", "}"), nil, revisions{"a": one(func(s *lar.Service) { s.Answer = of(0) })}},
		"a stream":                {"/v1/completions", answers(stream, "data: 1\n\n"), nil, revisions{"a": one(func(s *lar.Service) { s.FirstToken = of(0) })}},
		"many events":             {"/generate", answers(stream, "data: 1\n\n", "data: 2\n\n"), nil, revisions{"a": one(func(s *lar.Service) { s.FirstToken, s.InterToken = of(0), of(0) })}},
		"empty":                   {"/generate", answers(stream), nil, revisions{"a": {Requests: 1}}},
		"refused":                 {"/generate", status(400), nil, revisions{"a": {Requests: 1}}},
		"too many":                {"/generate", status(429), nil, revisions{"a": {Requests: 1}}},
		"an error":                {"/generate", status(500), nil, revisions{"a": failed}},
		"breaks off":              {"/generate", breaks, nil, revisions{"a": one(func(s *lar.Service) { s.Failures, s.FirstToken = 1, of(0) })}},
		"loads, the second":       {"/generate", status(503), answers(whole, "{}"), revisions{"a": failed, "b": one(func(s *lar.Service) { s.Answer = of(0) })}},
		"disconnects, the second": {"/generate", refuses, answers(whole, "{}"), revisions{"a": failed, "b": one(func(s *lar.Service) { s.Answer = of(0) })}},
		"no tokens":               {"/v1/tokenize", status(500), nil, revisions{}},
	} {
		t.Run(name, func(t *testing.T) {
			engine := newEngine(t, "a", 0, tc.first)
			engine.Revision = "a"
			pool := newPool(engine)
			url, observations := proxyServer(t, pool, ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
			clock := &testClock{}
			observations.now = clock.now
			if tc.second != nil {
				second := newEngine(t, "b", 0, tc.second)
				second.Revision = "b"
				pool.Set([]discovery.Backend{engine, second})
				// It is tried second because it has more load.
				lease, _ := pool.acquire(requestOf("/v1/models", "x", nil), map[string]bool{engine.Address: true})
				defer lease.Release()
			}
			response, err := http.Post(url+tc.path, "application/json", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, response.Body) //nolint:errcheck // some responses break off
			response.Body.Close()
			counted := func() bool { return cmp.Equal(tc.want, servedBy(t, observations), cmpopts.EquateEmpty()) }
			eventually(t, "the request is counted", counted)
		})
	}
}

// TestCountsCovariates checks that each time is recorded with the lengths of prompt and answer, and with the requests
// in flight on the pod.
func TestCountsCovariates(t *testing.T) {
	hold, held := make(chan struct{}), make(chan struct{})
	answer := func(kind, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v1/chat/completions" { // stays in flight
				close(held)
				<-hold
			}
			w.Header().Set("Content-Type", kind)
			io.WriteString(w, text) //nolint:errcheck // the client verifies the body
		}
	}
	const json, stream = "application/json", "text/event-stream"
	body := func(n int, rest string) string { return fmt.Sprintf(`{"prompt":%q%s}`, strings.Repeat("x", n), rest) }
	for name, tc := range map[string]struct {
		path, body   string
		kind, answer string
		generated    int
	}{
		"usage":                  {"/v1/completions", body(400, ""), json, `{"choices":[{"text":"\"completion_tokens\":9"}],"usage":{"completion_tokens":7}}`, 7},
		"a message":              {"/v1/messages", body(400, `,"max_tokens":9`), json, `{"content":[],"usage":{"output_tokens":5}}`, 5},
		"no usage":               {"/v1/completions", body(400, `,"max_tokens":9`), json, `{}`, 9},
		"no usage, and no limit": {"/v1/completions", body(400, ""), json, `{}`, 256},
		"a stream":               {"/v1/completions", body(400, `,"stream":true`), stream, "data: 1\n\ndata: 2\n\ndata: 3\n\n", 3},
	} {
		t.Run(name, func(t *testing.T) {
			hold, held = make(chan struct{}), make(chan struct{})
			engine := newEngine(t, "a", 0, answer(tc.kind, tc.answer))
			engine.Revision = "a"
			url, observations := proxyServer(t, newPool(engine), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
			post := func(path, body string) {
				response, err := http.Post(url+path, "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				io.Copy(io.Discard, response.Body) //nolint:errcheck // only the counters are checked
				response.Body.Close()
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				post("/v1/chat/completions", `{"messages":[]}`)
			}()
			<-held
			post(tc.path, tc.body)
			eventually(t, "the request is counted", func() bool { return servedBy(t, observations)["a"].Requests == 1 })
			served := servedWithCovariates(t, observations)["a"]
			m := served.Answer
			if tc.kind == stream {
				m = served.FirstToken
				if served.InterToken.Covariates.X != m.Covariates.X {
					t.Errorf("%+v, and between tokens %+v", m.Covariates, served.InterToken.Covariates)
				}
			}
			prompt := float64((len(tc.body)) / 4)
			if c := m.Covariates; c.N != 1 || c.X != [3]float64{prompt, float64(tc.generated), 1} || c.Product(0, 1) != prompt*float64(tc.generated) {
				t.Errorf("%+v, want prompt %v, %d generated tokens, 1 in flight", c, prompt, tc.generated)
			}
			close(hold)
			<-done
		})
	}
}

// TestTimesOfAStream checks that times are measured as clients see them, event by event.
func TestTimesOfAStream(t *testing.T) {
	clock := &testClock{}
	next := make(chan struct{})
	engine := newEngine(t, "a", 0, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		for i := range 4 {
			<-next
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
		}
		<-next
	})
	engine.Revision = "a"
	url, observations := proxyServer(t, newPool(engine), ProxyOptions{MaxBodyBytes: 1 << 10, EndpointWait: time.Second})
	observations.now = clock.now
	want := lar.Service{}
	for _, leavesAfter := range []int{4, 2, 1} {
		response, err := http.Post(url+"/generate", "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		events := bufio.NewReader(response.Body)
		for range leavesAfter {
			clock.pass(2)
			next <- struct{}{}
			for range 2 {
				if _, err := events.ReadString('\n'); err != nil {
					t.Fatal(err)
				}
			}
		}
		want.Requests++
		want.FirstToken.Add(2)
		if leavesAfter > 1 {
			want.InterToken.Add(2)
		}
		// A disconnect of the client is not a failure of the engine.
		response.Body.Close()
		eventually(t, "the request is counted", func() bool { return servedBy(t, observations)["a"] == want })
		for range 5 - leavesAfter {
			next <- struct{}{}
		}
	}
}

// TestCountsOutcomesThroughAGateway checks that requests of a gateway are counted like those of the proxy, as far as
// the gateway reports them.
func TestCountsOutcomesThroughAGateway(t *testing.T) {
	engines := []discovery.Backend{{Pod: "a", Address: "a:1", Revision: "a"}, {Pod: "b", Address: "b:1", Revision: "b"}}
	gateway, observations, _ := newPicker(t, newPool(engines...), ProxyOptions{})
	clock := &testClock{}
	observations.now = clock.now
	want := map[string]lar.Service{}
	add := func(revision string, s lar.Service) {
		sum := want[revision]
		sum.Merge(s)
		want[revision] = sum
	}
	for name, tc := range map[string]struct {
		code     int
		fallback bool
		leaves   bool
		kind     string
		want     lar.Service
	}{
		"a stream":     {200, false, false, "text/event-stream", lar.Service{Requests: 1, FirstToken: of(2)}},
		"in one piece": {200, false, false, "application/json", lar.Service{Requests: 1, Answer: of(2)}},
		"an error":     {500, false, false, "application/json", lar.Service{Requests: 1, Failures: 1}},
		"refused":      {400, false, false, "application/json", lar.Service{Requests: 1}},
		"the second":   {200, true, false, "application/json", lar.Service{Requests: 1, Answer: of(2)}},
		"leaves":       {200, false, true, "text/event-stream", lar.Service{Requests: 1, FirstToken: of(2)}},
	} {
		s, endpoints, _ := begin(t, gateway, "{}", nil, nil)
		served := endpoints[0]
		if tc.fallback {
			add(podOf(served), lar.Service{Requests: 1, Failures: 1})
			served = endpoints[1]
		}
		add(podOf(served), tc.want)
		s.ResponseHeaders(tc.code, map[string]string{"content-type": tc.kind}, false, served)
		s.Answered()
		clock.pass(2)
		s.ResponseBody([]byte("data: 1\n\n"), 100, !tc.leaves)
		if tc.leaves {
			s.Body(1)
			if err := s.End(); err != io.EOF {
				t.Fatal(err)
			}
		} else {
			s.Body(-1)
		}
		eventually(t, name+": the request is counted", func() bool { return cmp.Equal(want, servedBy(t, observations)) })
	}
}

// TestKeepsLocalityByMinute checks that the local activation rate of each revision is kept per minute, for requests
// that were routed by the pod's plan.
func TestKeepsLocalityByMinute(t *testing.T) {
	o := newObservations(prometheus.NewRegistry(), ProxyOptions{SamplePercent: 100}, NewPool())
	for _, observation := range []lar.Observation{
		{Revision: "unplanned", Count: lar.Count{Activations: lar.Activations{Local: 1, Total: 4}}},
		{Revision: "planned", Plan: "d", Count: lar.Count{Activations: lar.Activations{Local: 2, Total: 4}}}, // before the tables were loaded
		{Revision: "planned", Plan: "d", Forecast: &lar.Forecast{Tables: "d"}, Count: lar.Count{Activations: lar.Activations{Local: 3, Total: 4}}},
	} {
		o.add(observation)
	}
	got := servedBy(t, o)
	for revision, local := range map[string]int64{"unplanned": 1, "planned": 3} {
		if locality := got[revision].Locality; locality.Requests != 1 || locality.Local != local || got[revision].Requests != 0 {
			t.Errorf("%s: %+v, want one sampled request with %d local activations", revision, got[revision], local)
		}
	}
}
