// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/tier"
)

// soakRequests is the number of requests of the randomised fault run.
var soakRequests = tier.Choose(6000, 6000, 1_000_000)

// TestFaults runs requests while engines die, hang, respond slowly, break off and claim to be ready when they are not,
// and while pods and plans change. Every request ends with its own complete response or with an error that its client
// sees, none is scored with the table of another plan than its pod's, and no resources leak.
func TestFaults(t *testing.T) {
	const seed = 1
	before := runtime.NumGoroutine()
	run := newFaultRun(t, seed)
	stop := make(chan struct{})
	var changes sync.WaitGroup
	changes.Go(func() { run.change(stop) })

	var next atomic.Int64
	var heap atomic.Uint64
	var clients sync.WaitGroup
	for worker := range 24 {
		clients.Go(func() {
			client := &faultClient{faultRun: run, random: rand.New(rand.NewPCG(seed, uint64(worker)+1))}
			for {
				i := next.Add(1)
				if i > int64(soakRequests) || t.Failed() {
					return
				}
				if i == int64(soakRequests)/4 {
					heap.Store(liveHeap())
				}
				client.send(fmt.Sprintf("request-%d", i))
				if i%500 == 0 {
					run.checkForecasts()
				}
			}
		})
	}
	clients.Wait()
	close(stop)
	changes.Wait()
	run.checkForecasts()
	eventually(t, "no token is outstanding", func() bool { return outstanding(run.pool) == 0 })
	grown := int64(liveHeap()) - int64(heap.Load())
	run.close()
	eventually(t, "all goroutines have ended", func() bool { return runtime.NumGoroutine() <= before })
	run.report(grown)
	if limit := int64(16 << 20); grown > limit {
		t.Errorf("the heap has grown by %d bytes since a quarter of the requests; allowed is %d", grown, limit)
	}
}

func liveHeap() uint64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// endpointWait is the time that a request waits for a pod: less than the periods without any.
const endpointWait = 100 * time.Millisecond

// faultRun is a router in front of faulty engines.
type faultRun struct {
	t            *testing.T
	pool         *Pool
	observations *Observations
	server       *httptest.Server
	client       *http.Client
	// layouts are the plans that pods may name. All scores in the table of a plan are equal, and differ from those of
	// other plans.
	layouts []*plans.Layout
	share   map[string]float64 // by digest

	mu      sync.Mutex
	random  *rand.Rand
	engines []*faultyEngine
	made    int
	// harmed contains requests with a response that an engine has damaged; their clients may see errors.
	harmed map[string]bool

	whole, streams, scored, refused, broken, left, checked atomic.Int64
}

func newFaultRun(t *testing.T, seed uint64) *faultRun {
	t.Helper()
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	run := &faultRun{
		t: t, pool: NewPool(), share: map[string]float64{},
		random: rand.New(rand.NewPCG(seed, 0)), harmed: map[string]bool{},
	}
	first, second := solved(t)
	for i, p := range []planned{first, second} {
		constant := *p.Plan
		score := uint16(affinity.ScoreScale * (i + 1) / 8)
		constant.Ranks = &affinity.RankTable{Ranks: p.Plan.Ranks.Ranks, Score: slices.Repeat([]uint16{score}, len(p.Plan.Ranks.Score))}
		layout := plans.New(p.Artifact.Digest, &constant, p.layout.Tokenizer)
		run.layouts = append(run.layouts, layout)
		run.share[layout.Digest] = float64(score) / affinity.ScoreScale
	}
	var proxy http.Handler
	proxy, run.observations = NewProxy(run.pool, prometheus.NewRegistry(), logr.Discard(), ProxyOptions{
		RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutedExperts: adapter.RoutedExperts, SamplePercent: 20, MaxBodyBytes: 1 << 16, EndpointWait: endpointWait,
	})
	run.server = httptest.NewServer(proxy)
	run.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	for range 3 {
		run.add()
	}
	run.setPods()
	return run
}

// change changes pods and plans until it is stopped.
func (run *faultRun) change(stop chan struct{}) {
	tick := time.NewTicker(15 * time.Millisecond)
	defer tick.Stop()
	for i := 1; ; i++ {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		run.mu.Lock()
		what, layout := run.random.IntN(10), run.layouts[run.random.IntN(len(run.layouts))]
		dark := i%150 == 0
		run.mu.Unlock()
		switch {
		case dark: // for longer than a request waits for a pod
			run.pool.Set(nil)
			select {
			case <-stop:
			case <-time.After(2 * endpointWait):
			}
			run.setPods()
		case what < 2:
			run.add()
			run.setPods()
		case what < 4: // the pod dies, and the router learns of it later, if ever
			run.kill()
		case what < 7:
			run.setPods()
		case what < 9:
			run.pool.AddLayout(layout)
		default:
			run.pool.DropLayout(layout.Digest)
		}
	}
}

// add starts a pod with one of the plans or without a plan.
func (run *faultRun) add() {
	run.mu.Lock()
	defer run.mu.Unlock()
	if len(run.engines) >= 8 {
		return
	}
	run.made++
	e := &faultyEngine{run: run, name: fmt.Sprintf("pod-%d", run.made)}
	if plan := run.random.IntN(3); plan < len(run.layouts) {
		e.plan = run.layouts[plan].Digest
	}
	e.Server = httptest.NewServer(e)
	run.engines = append(run.engines, e)
}

// kill ends a pod at any point of its work. Three pods always remain: a service without pods is a separate case.
func (run *faultRun) kill() {
	run.mu.Lock()
	var dead *faultyEngine
	if len(run.engines) > 3 {
		at := run.random.IntN(len(run.engines))
		dead = run.engines[at]
		run.engines = slices.Delete(run.engines, at, at+1)
	}
	run.mu.Unlock()
	if dead != nil {
		dead.die()
	}
}

// setPods sets the current pods in the router.
func (run *faultRun) setPods() {
	run.mu.Lock()
	defer run.mu.Unlock()
	var backends []discovery.Backend
	for _, e := range run.engines {
		backends = append(backends, discovery.Backend{Pod: e.name, Address: e.Listener.Addr().String(), Ranks: 4, Revision: "r", PlanDigest: e.plan, Shape: &planstest.Shape})
	}
	run.pool.Set(backends)
}

func (run *faultRun) harm(id string) {
	run.mu.Lock()
	defer run.mu.Unlock()
	run.harmed[id] = true
}

// forgive reports whether the response to a request was damaged, and forgets the request.
func (run *faultRun) forgive(id string) bool {
	run.mu.Lock()
	defer run.mu.Unlock()
	harmed := run.harmed[id]
	delete(run.harmed, id)
	return harmed
}

// checkForecasts requires that the forecast of each sampled request equals the constant score of its pod's plan.
func (run *faultRun) checkForecasts() {
	for _, o := range run.observations.recent() {
		if o.Forecast == nil {
			continue
		}
		run.checked.Add(1)
		if math.Abs(o.Forecast.Predicted-run.share[o.Plan]) > 1e-3 {
			run.t.Errorf("a request to a pod of plan %.8s is predicted as %v; the score of that plan is %v for every request", o.Plan, o.Forecast.Predicted, run.share[o.Plan])
			return
		}
	}
}

func (run *faultRun) close() {
	run.client.CloseIdleConnections()
	run.server.Close()
	for _, e := range run.engines {
		e.die()
	}
}

func (run *faultRun) report(grown int64) {
	run.t.Logf("%d pods; %d whole answers, %d of them streams, %d scored; %d refused, %d broken off, %d left by their clients; %d forecasts checked; heap grown by %d KiB",
		run.made, run.whole.Load(), run.streams.Load(), run.scored.Load(), run.refused.Load(), run.broken.Load(), run.left.Load(), run.checked.Load(), grown>>10)
	for what, count := range map[string]*atomic.Int64{
		"whole answers": &run.whole, "streams": &run.streams, "scored requests": &run.scored, "refused requests": &run.refused,
		"answers broken off": &run.broken, "clients that left": &run.left, "forecasts": &run.checked,
	} {
		// In the usual few thousand requests, there may always be a pod that accepts them.
		if count.Load() == 0 && !(soakRequests <= 6000 && count == &run.refused) {
			run.t.Errorf("there were no %s: the run shows nothing", what)
		}
	}
}

// faultyEngine is the engine of a pod. It answers most requests, and draws a random fault for the others.
type faultyEngine struct {
	*httptest.Server
	run  *faultRun
	name string
	plan string

	mu   sync.Mutex
	dead bool
	// present contains the requests in progress, latest the requests that were just answered. The death of the engine
	// damages both.
	present map[string]bool
	latest  []string
}

// begin registers a request in progress. It reports false if the engine is dead.
func (e *faultyEngine) begin(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.present == nil {
		e.present = map[string]bool{}
	}
	e.present[id] = true
	return !e.dead
}

// end marks a request as answered. The last bytes of the latest responses may still be in transit.
func (e *faultyEngine) end(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.present, id)
	if e.latest = append(e.latest, id); len(e.latest) > 64 {
		e.latest = slices.Delete(e.latest, 0, 1)
	}
}

func (e *faultyEngine) die() {
	e.mu.Lock()
	e.dead = true
	for id := range e.present {
		e.run.harm(id)
	}
	for _, id := range e.latest {
		e.run.harm(id)
	}
	e.mu.Unlock()
	e.Listener.Close()
	e.CloseClientConnections()
	e.Close()
}

func (e *faultyEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var asked struct {
		ID      string `json:"id"`
		Stream  bool   `json:"stream"`
		Experts bool   `json:"return_routed_experts"`
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client disconnected or the engine died during the response
	}
	if err := json.Unmarshal(body, &asked); err != nil || asked.ID == "" {
		e.run.t.Errorf("pod %s got an unreadable request: %v", e.name, err)
		return
	}
	if !e.begin(asked.ID) {
		e.run.harm(asked.ID)
	}
	defer e.end(asked.ID)
	e.run.mu.Lock()
	fault, part := e.run.random.IntN(4000), e.run.random.Float64()
	e.run.mu.Unlock()
	switch {
	case fault < 80:
		select {
		case <-time.After(time.Duration(part * float64(20*time.Millisecond))):
		case <-r.Context().Done():
		}
	case fault < 160: // claims to be ready but does not serve
		http.Error(w, loadingEngine, http.StatusServiceUnavailable)
		return
	case fault < 200: // disconnects before the first byte of the response
		panic(http.ErrAbortHandler)
	case fault < 202: // never responds; the client times out
		e.run.harm(asked.ID)
		<-r.Context().Done()
		return
	}
	experts := ""
	if asked.Experts {
		experts = encodedExperts(slices.Repeat([]int32{0, 1, 2, 3}, 2*planstest.Shape.Layers)...)
	}
	breaks := fault >= 202 && fault < 280
	if breaks {
		e.run.harm(asked.ID)
	}
	if asked.Stream {
		e.stream(w, asked.ID, experts, breaks)
		return
	}
	answer := map[string]any{"id": asked.ID, "pod": e.name, "choices": []any{map[string]any{"text": strings.Repeat("word ", 50)}}, "end": true}
	if experts != "" {
		answer["sglext"] = map[string]any{"routed_experts": experts}
	}
	data, err := json.Marshal(answer)
	if err != nil {
		e.run.t.Error(err)
	}
	w.Header().Set("Content-Type", "application/json")
	if fault%2 == 0 {
		w.Header().Set("Content-Length", fmt.Sprint(len(data)))
	}
	if breaks {
		w.Write(data[:int(part*float64(len(data)))]) //nolint:errcheck // the response is truncated anyway
		panic(http.ErrAbortHandler)
	}
	w.Write(data) //nolint:errcheck // the client verifies the body
}

func (e *faultyEngine) stream(w http.ResponseWriter, id, experts string, breaks bool) {
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range 4 {
		fmt.Fprintf(w, "data: {\"id\":%q,\"pod\":%q,\"choices\":[{\"text\":\"word %d\"}]}\n\n", id, e.name, i)
		w.(http.Flusher).Flush()
		if breaks && i == 2 {
			panic(http.ErrAbortHandler)
		}
	}
	if experts != "" {
		fmt.Fprintf(w, "data: {\"id\":%q,\"choices\":[],\"sglext\":{\"routed_experts\":%q}}\n\n", id, experts)
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// faultClient sends requests one after another and checks the responses.
type faultClient struct {
	*faultRun
	random *rand.Rand
}

// patience is the client timeout on an idle machine. Only a hanging engine takes that long.
const patience = 5 * time.Second

var prompts = []string{"func main() { return nil }", "SELECT name FROM users WHERE id = 1;", "der Hund ist nicht im Haus", "it was the best of times"}

func (c *faultClient) send(id string) {
	stream := c.random.IntN(3) == 0
	body, err := json.Marshal(map[string]any{
		"id": id, "stream": stream, "max_tokens": 1 + c.random.IntN(64),
		"prompt": strings.Repeat(prompts[c.random.IntN(len(prompts))]+" ", 1+c.random.IntN(5)) + id,
	})
	if err != nil {
		c.t.Error(err)
		return
	}
	limit, leaves := load.Scale(patience), c.random.IntN(100) == 0
	if leaves {
		limit = time.Duration(c.random.IntN(int(20 * time.Millisecond)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err = c.exchange(ctx, id, body, stream)
	harmed := c.forgive(id)
	var refusal *refusedError
	switch {
	case err == nil:
		c.whole.Add(1)
	case errors.As(err, &refusal):
		c.refused.Add(1)
		if refusal.code < http.StatusInternalServerError {
			c.t.Errorf("%s was refused with status %d, as if it were wrong", id, refusal.code)
		}
	case leaves && ctx.Err() != nil:
		c.left.Add(1)
	case isBroken(err):
		c.broken.Add(1)
		if !harmed {
			c.t.Errorf("%s was broken off although no engine has spoilt it: %v", id, err)
		}
	default:
		c.t.Errorf("%s: %v", id, err)
	}
}

// loadingEngine is the body of an engine that claims to be ready but does not serve.
const loadingEngine = "loading"

// refusedError is a response that reports an error.
type refusedError struct{ code int }

func (e *refusedError) Error() string { return fmt.Sprintf("status %d", e.code) }

// isBroken reports whether an error is what a client sees of a response that ends early or never begins.
func isBroken(err error) bool {
	var network net.Error
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &network)
}

func (c *faultClient) exchange(ctx context.Context, id string, body []byte, stream bool) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.server.URL+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set(HeaderRequestID, id)
	response, err := c.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		if response.StatusCode == http.StatusServiceUnavailable && strings.TrimSpace(string(text)) == loadingEngine {
			return &refusedError{response.StatusCode} // all engines refused for as long as a client waits
		}
		var failure struct{ Error struct{ Message string } }
		if err := json.Unmarshal(text, &failure); err != nil || failure.Error.Message == "" {
			return fmt.Errorf("status %d without a reason: %v", response.StatusCode, err) //nolint:errorlint // a malformed response is not a truncated one
		}
		return &refusedError{response.StatusCode}
	}
	read := readWhole
	if stream {
		read = readStream
	}
	pod, err := read(response.Body, id)
	if err != nil {
		return err
	}
	if stream {
		c.streams.Add(1)
	}
	if named := response.Header.Get(HeaderPod); named != pod {
		return fmt.Errorf("the response is from pod %q, the header is %q", pod, named)
	}
	if response.Header.Get(HeaderPlan) != "" {
		c.scored.Add(1)
	}
	return nil
}

// readWhole requires the complete response to a request, and returns the pod that served it.
func readWhole(from io.Reader, id string) (pod string, err error) {
	data, err := io.ReadAll(from)
	if err != nil {
		return "", err
	}
	var answer struct {
		ID, Pod string
		End     bool
		Sglext  json.RawMessage
	}
	if err := json.Unmarshal(data, &answer); err != nil || answer.ID != id || !answer.End || answer.Sglext != nil {
		return "", fmt.Errorf("answer %q (%v)", data, err) //nolint:errorlint // a malformed response is not a truncated one
	}
	return answer.Pod, nil
}

// readStream requires all events of the response to a request, and returns the pod that served it.
func readStream(from io.Reader, id string) (pod string, err error) {
	var events []string
	for lines := bufio.NewScanner(from); ; {
		if !lines.Scan() {
			if err := lines.Err(); err != nil {
				return "", err
			}
			break
		}
		if event, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			events = append(events, event)
		}
	}
	if len(events) != 5 || events[4] != "[DONE]" {
		return "", fmt.Errorf("a stream that seems whole has the events %q", events)
	}
	for _, event := range events[:4] {
		var part struct{ ID, Pod string }
		if err := json.Unmarshal([]byte(event), &part); err != nil || part.ID != id {
			return "", fmt.Errorf("event %q (%v)", event, err) //nolint:errorlint // a malformed event is not a truncated stream
		}
		pod = part.Pod
	}
	return pod, nil
}
