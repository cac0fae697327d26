// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestWindowImbalance(t *testing.T) {
	roundRobin := func(n, ranks int) *measurement {
		m := &measurement{}
		for i := range n {
			m.replies = append(m.replies, reply{rank: i % ranks, tokens: 10})
			m.arrivals = append(m.arrivals, i)
		}
		return m
	}
	skewed := roundRobin(2*window, 4)
	for i := range skewed.replies {
		if skewed.replies[i].rank == 0 {
			skewed.replies[i].tokens = 30 // 30 of every 60 tokens are on one of four ranks
		}
	}
	// The load is balanced overall, but in only one window: the first half of the requests goes to one rank, the second
	// half to the other. As the window slides, 128, 127, ... 64, ... 128 of its 128 requests are on one rank.
	halves := roundRobin(2*window, 2)
	for i := range halves.replies {
		halves.replies[i].rank = i / window
	}
	reversed := roundRobin(2*window, 4)
	slices.Reverse(reversed.arrivals)
	for name, test := range map[string]struct {
		m    *measurement
		want float64
	}{
		"round-robin":                  {roundRobin(3*window, 4), 1},
		"exactly one window":           {roundRobin(window, 4), 1},
		"one overloaded rank":          {skewed, 2},
		"first half, then second half": {halves, 1.5},
		"reversed order":               {reversed, 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := test.m.windowImbalance(); math.Abs(got-test.want) > 0.01 {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestTimesOfRequests(t *testing.T) {
	of := func(millis ...int) *measurement {
		m := &measurement{}
		for _, n := range millis {
			m.replies = append(m.replies, reply{taken: time.Duration(n) * time.Millisecond})
		}
		return m
	}
	before := of(10, 20, 30, 40)
	if got := before.milliseconds(); got != 25 {
		t.Errorf("the mean is %v ms, want 25", got)
	}
	for name, test := range map[string]struct {
		after            *measurement
		change, interval float64
		want             string
	}{
		"the same":   {before, 0, 0, "within noise"},
		"all slower": {of(15, 25, 35, 45), 0.2, 0, "slower"},
		"all faster": {of(5, 15, 25, 35), -0.2, 0, "faster"},
		"one slower": {of(10, 20, 30, 60), 0.2, 0.4, "within noise"},
	} {
		change, interval := test.after.slowerThan(before)
		if math.Abs(change-test.change) > 1e-9 || math.Abs(interval-test.interval) > 1e-9 {
			t.Errorf("%s: %v ± %v, want %v ± %v", name, change, interval, test.change, test.interval)
		}
		r := &report{before: before, after: test.after}
		if lines := r.times(); len(lines) != 1 || !strings.Contains(lines[0], test.want) {
			t.Errorf("%s: %q lacks %q", name, lines, test.want)
		}
	}
}

func TestSamples(t *testing.T) {
	const metrics = `# HELP semmoe_activations_total Activations.
# TYPE semmoe_activations_total counter
semmoe_activations_total{locality="local",rank="0"} 12
semmoe_activations_total{locality="remote",rank="0"} 3.5e+06
semmoe_activations_total_created{locality="local"} 7
semmoe_capture_cost_ratio 1.02
semmoe_capture_cost_ratio_standard_error 0.01
semmoe_local_activation_rate NaN
`
	want := []sample{{`locality="local",rank="0"`, 12}, {`locality="remote",rank="0"`, 3.5e6}}
	var got []sample
	for s := range samples(metrics, "semmoe_activations_total") {
		got = append(got, s)
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(sample{})); diff != "" {
		t.Error(diff)
	}
	got = nil
	for s := range samples(metrics, "semmoe_capture_cost_ratio") {
		got = append(got, s)
	}
	if diff := cmp.Diff([]sample{{"", 1.02}}, got, cmp.AllowUnexported(sample{})); diff != "" {
		t.Errorf("a metric without labels:\n%s", diff)
	}
}

// measured returns a measurement with 1,000 activations, of which local are local.
func measured(local float64) *measurement {
	m := &measurement{activations: activations{local, 1000}, engine: activations{local, 1000}, forecast: 0.4}
	for i := range 2 * window {
		m.replies = append(m.replies, reply{output: []int{1, 2, 3, 4, 5, 6, 7, i}, pod: []string{"a", "b"}[i/4%2], rank: i % 4, tokens: 10, plan: "abc"})
		m.arrivals = append(m.arrivals, i)
	}
	return m
}

// failing returns the names of the checks that do not hold.
func failing(checks []check) []string {
	var names []string
	for _, c := range checks {
		if !c.holds {
			names = append(names, c.name)
		}
	}
	return names
}

// TestCheckPlan checks that each check can fail without failing another one.
func TestCheckPlan(t *testing.T) {
	for name, test := range map[string]struct {
		change func(before, after *measurement)
		fails  []string
	}{
		"all hold":                {func(_, _ *measurement) {}, nil},
		"no gain":                 {func(before, _ *measurement) { before.local, before.engine.local = 300, 300 }, []string{"the local activation rate increased"}},
		"rate below the forecast": {func(_, after *measurement) { after.local, after.engine.local = 360, 360 }, []string{"the observed rate matches the prediction"}},
		"engine ignores its map":  {func(_, after *measurement) { after.engine.local = 250 }, []string{"the engines' counters agree"}},
		"an idle rank": {func(_, after *measurement) {
			for i := range after.replies {
				if after.replies[i].rank == 3 {
					after.replies[i].pod = "a"
				}
			}
		}, []string{"every rank of every replica was used"}},
		"a missing token":         {func(_, after *measurement) { after.replies[3].output = after.replies[3].output[:7] }, []string{"outputs are unchanged"}},
		"one other token":         {func(before, _ *measurement) { before.replies[3].output[7]++ }, []string{"outputs are unchanged"}},
		"routed without the plan": {func(_, after *measurement) { after.replies[9].plan = "" }, []string{"the plan routed the requests"}},
		"an overloaded rank": {func(_, after *measurement) {
			for i := range after.replies {
				after.replies[i].tokens += 20 * (after.replies[i].rank / 3)
			}
		}, []string{"ranks are balanced"}},
	} {
		t.Run(name, func(t *testing.T) {
			before, after := measured(250), measured(405)
			test.change(before, after)
			if diff := cmp.Diff(test.fails, failing(checkPlan(before, after, "abc", 0.41))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCheckReshuffled(t *testing.T) {
	for name, test := range map[string]struct {
		change func(byWeights *measurement)
		fails  []string
	}{
		"both hold":                        {func(*measurement) {}, nil},
		"one other token":                  {func(m *measurement) { m.replies[3].output[7]++ }, []string{"reshuffled weights: outputs are the same"}},
		"lower rate":                       {func(m *measurement) { m.local, m.engine.local = 390, 390 }, []string{"reshuffled weights: the rate is the same"}},
		"other ranks, other forecast":      {func(m *measurement) { m.local, m.engine.local, m.forecast = 425, 425, 0.42 }, nil},
		"engine counts old expert numbers": {func(m *measurement) { m.engine.local = 250 }, []string{"reshuffled weights: the rate is the same"}},
	} {
		t.Run(name, func(t *testing.T) {
			byWeights := measured(405)
			test.change(byWeights)
			if diff := cmp.Diff(test.fails, failing(checkReshuffled(measured(250), measured(405), byWeights))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCheckCapture(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*captured)
		fails  []string
	}{
		"both hold":                 {func(*captured) {}, nil},
		"a high cost":               {func(c *captured) { c.costs[0].ratio = 2 }, nil},
		"one other token":           {func(c *captured) { c.served.replies[3].output[7]++ }, []string{"sampling does not change the outputs"}},
		"a router without requests": {func(c *captured) { c.costs[1].ratio = math.NaN() }, nil},
		"no router reports":         {func(c *captured) { c.costs[0].ratio, c.costs[1].standardError = math.NaN(), math.NaN() }, []string{"the cost of sampling is reported"}},
		"no router":                 {func(c *captured) { c.costs = nil }, []string{"the cost of sampling is reported"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := captured{measured(400), []captureCost{{1.01, 0.03}, {0.99, 0.03}}}
			test.change(&c)
			if diff := cmp.Diff(test.fails, failing(checkCapture(measured(400), c))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestUntilKnown checks that requests are sent until each request router has enough of them, and that the demo goes on
// without the cost of a router that never gets enough.
func TestUntilKnown(t *testing.T) {
	unknown, known := captureCost{math.NaN(), math.NaN()}, captureCost{1.02, 0.03}
	for name, tc := range map[string]struct {
		first  int // round in which the last router has enough requests; 0: none
		err    error
		rounds int
	}{
		"at once": {first: 1, rounds: 1}, "after three rounds": {first: 3, rounds: 3}, "never": {rounds: maxCaptureRounds}, "an error": {err: errors.New("refused"), rounds: 1},
	} {
		rounds := 0
		costs, err := untilKnown(func() ([]captureCost, error) {
			rounds++
			if tc.err != nil {
				return nil, tc.err
			}
			if rounds == tc.first {
				return []captureCost{known, known}, nil
			}
			return []captureCost{known, unknown}, nil
		})
		if rounds != tc.rounds || err != tc.err || tc.err == nil && costs[1].known() != (tc.first > 0) {
			t.Errorf("%s: %d rounds, costs %v, %v; want %d rounds", name, rounds, costs, err, tc.rounds)
		}
	}
}

// TestNewConnections checks that each request has a separate connection, so that a Service distributes the requests
// over all request routers.
func TestNewConnections(t *testing.T) {
	var opened atomic.Int32
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	client := newConnections()
	const requests = 5
	for range requests {
		response, err := client.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, response.Body); err != nil {
			t.Error(err)
		}
		response.Body.Close()
	}
	if got := opened.Load(); got != requests {
		t.Errorf("%d requests on %d connections", requests, got)
	}
}
