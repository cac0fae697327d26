// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/refengine/model"
)

var loadTiny = sync.OnceValues(func() (*model.Model, error) {
	c, err := checkpoint.Open("../testdata/tiny-qwen3moe")
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return model.Load(c, 0)
})

// recorder is a sink that records its calls. Tests can wait for its end.
type recorder struct {
	stopAfter int // tokens; 0 never
	tokens    []int32
	prompt    []Token
	dones     int
	result    Result
	done      chan struct{}
}

func newRecorder() *recorder { return &recorder{done: make(chan struct{})} }

func (r *recorder) Prompt(tokens []Token) { r.prompt = append(r.prompt, tokens...) }

func (r *recorder) Token(t Token) bool {
	r.tokens = append(r.tokens, t.ID)
	return len(r.tokens) == r.stopAfter
}

func (r *recorder) Done(result Result) {
	if r.dones++; r.dones == 1 {
		r.result = result
		close(r.done)
	}
}

func (r *recorder) wait(t *testing.T) {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(time.Minute):
		t.Fatal("request does not end")
	}
}

// run starts a scheduler for the duration of the test.
func run(t *testing.T, change func(*Config)) *Scheduler {
	t.Helper()
	s := build(t, change)
	start(t, s)
	return s
}

// build returns a scheduler that accepts requests but is not started.
func build(t *testing.T, change func(*Config)) *Scheduler {
	t.Helper()
	m, err := loadTiny()
	if err != nil {
		t.Fatal(err)
	}
	config := Config{MaxRunning: 4, MaxQueued: 100, PrefillTokens: 32, ContextLength: 256, Ranks: 2, OnStep: func([]Computed) {}}
	if change != nil {
		change(&config)
	}
	return New(m, 2, config)
}

// start runs a scheduler until the test ends.
func start(t *testing.T, s *Scheduler) {
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() { defer close(stopped); s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-stopped })
}

func randomPrompt(rng *rand.Rand, n int) []int32 {
	prompt := make([]int32, n)
	for i := range prompt {
		prompt[i] = rng.Int32N(4096)
	}
	return prompt
}

// The output of a request does not depend on concurrent requests, on the chunk size of its prompt, or on canceled
// requests.
func TestResultsDoNotDependOnOtherRequests(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	var requests []Request
	for i := range 24 {
		r := Request{Prompt: randomPrompt(rng, 1+rng.IntN(90)), MaxNewTokens: rng.IntN(20), TopLogprobs: -1, KeepRoutes: true, Rank: i % 2}
		if i%3 == 0 {
			r.Sampling = Sampling{Temperature: 0.8, TopP: 0.9, Seed: uint64(i)}
		}
		requests = append(requests, r)
	}
	alone := run(t, func(c *Config) { c.MaxRunning, c.PrefillTokens = 1, 256 })
	crowd := run(t, nil)
	var want, got []*recorder
	for i, r := range requests {
		a, b := newRecorder(), newRecorder()
		a.stopAfter, b.stopAfter = i%7, i%7
		want, got = append(want, a), append(got, b)
		r.Sink = a
		if err := alone.Submit(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		r.Sink = b
		if err := crowd.Submit(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		// A concurrent request that is canceled.
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(20))*time.Millisecond)
		defer cancel()
		if err := crowd.Submit(ctx, Request{Prompt: randomPrompt(rng, 40), MaxNewTokens: 100, TopLogprobs: -1, Sink: newRecorder()}); err != nil {
			t.Fatal(err)
		}
	}
	for i, r := range requests {
		want[i].wait(t)
		got[i].wait(t)
		if diff := cmp.Diff(want[i].tokens, got[i].tokens); diff != "" {
			t.Errorf("request %d: %s", i, diff)
		}
		if !slices.Equal(want[i].result.Routes, got[i].result.Routes) || want[i].result.Stopped != got[i].result.Stopped {
			t.Errorf("request %d: results differ", i)
		}
		computed := len(r.Prompt) + max(len(got[i].tokens)-1, 0)
		if len(got[i].result.Routes) != computed*4*4 {
			t.Errorf("request %d: %d routes for %d computed tokens", i, len(got[i].result.Routes), computed)
		}
		if stopped := len(got[i].tokens) > 0 && len(got[i].tokens) == got[i].stopAfter; stopped != got[i].result.Stopped || got[i].result.Err != nil {
			t.Errorf("request %d: result %+v", i, got[i].result)
		}
	}
}

// The limits hold after every step, prompts are split into chunks, every token is reported once, and requests are
// admitted in the order of their arrival.
func TestBoundsAndOrder(t *testing.T) {
	var mu sync.Mutex
	computed, most := [2]int{}, 0
	firstStep := map[int]int{} // length of the first chunk by rank: only rank 1's prompt is longer than a chunk
	s := build(t, func(c *Config) {
		c.MaxRunning = 3
		c.OnStep = func(steps []Computed) {
			mu.Lock()
			defer mu.Unlock()
			for _, step := range steps {
				n := len(step.Routes) / 16
				if n != len(step.Tokens) {
					t.Errorf("routes of %d tokens for %d", n, len(step.Tokens))
				}
				computed[step.Rank] += n
				if _, seen := firstStep[step.Rank]; !seen {
					firstStep[step.Rank] = n
				}
				most = max(most, n)
			}
		}
	})
	var order []int
	var active activity
	var sinks []*recorder
	tokens := [2]int{}
	for i := range 10 {
		sink := newRecorder()
		sinks = append(sinks, sink)
		length := 10
		if i%2 == 1 {
			length = 100
		}
		tokens[i%2] += length + 4
		if err := s.Submit(t.Context(), Request{Prompt: make([]int32, length), MaxNewTokens: 5, TopLogprobs: -1, Rank: i % 2, Sink: &ordered{recorder: sink, i: i, order: &order, activity: &active}}); err != nil {
			t.Fatal(err)
		}
	}
	start(t, s) // not before: the requests of the first step determine which requests run concurrently
	for _, sink := range sinks {
		sink.wait(t)
	}
	if active.most != 3 {
		t.Errorf("%d requests ran together, the bound is 3 and there was work for more", active.most)
	}
	running := 0
	for _, load := range s.Loads() {
		running += load.Running + load.Waiting + load.UsedTokens + load.TotalTokens
	}
	if running != 0 {
		t.Errorf("an idle scheduler reports load %+v", s.Loads())
	}
	mu.Lock()
	defer mu.Unlock()
	if computed != tokens {
		t.Errorf("%v tokens computed, want %v", computed, tokens)
	}
	if most > 32 || firstStep[1] >= 100 {
		t.Errorf("a chunk of %d tokens, the bound is 32", most)
	}
	// Requests of equal length finish in the order of their arrival.
	for rank := range 2 {
		of := slices.DeleteFunc(slices.Clone(order), func(i int) bool { return i%2 != rank })
		if !slices.IsSorted(of) {
			t.Errorf("first tokens in order %v", order)
		}
	}
}

// ordered records the order of first tokens, and the number of requests between their first token and their end.
type ordered struct {
	*recorder
	*activity
	i     int
	order *[]int
}

type activity struct{ now, most int }

func (o *ordered) Token(t Token) bool {
	if len(o.tokens) == 0 {
		*o.order = append(*o.order, o.i)
		o.now++
		o.most = max(o.most, o.now)
	}
	return o.recorder.Token(t)
}

func (o *ordered) Done(r Result) {
	o.now--
	o.recorder.Done(r)
}

func TestSubmitRefuses(t *testing.T) {
	s := run(t, nil)
	for name, test := range map[string]struct {
		request Request
		want    string
	}{
		"no prompt":      {Request{}, "prompt is empty"},
		"negative count": {Request{Prompt: []int32{1}, MaxNewTokens: -1}, "-1 tokens"},
		"too long":       {Request{Prompt: []int32{1}, MaxNewTokens: 256}, "exceed the context length 256"},
		"rank":           {Request{Prompt: []int32{1}, Rank: 2}, "allowed is 0 to 1"},
		"token":          {Request{Prompt: []int32{4096}}, "outside the vocabulary of 4096"},
	} {
		if err := s.Submit(t.Context(), test.request); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}

func TestDrainAndAbandon(t *testing.T) {
	m, err := loadTiny()
	if err != nil {
		t.Fatal(err)
	}
	s := New(m, 1, Config{MaxRunning: 1, MaxQueued: 2, PrefillTokens: 32, ContextLength: 256, Ranks: 1, OnStep: func([]Computed) {}})
	select {
	case <-New(m, 1, Config{Ranks: 1}).Drain():
	default:
		t.Error("a scheduler without requests is not drained")
	}
	submit := func() (*recorder, error) {
		sink := newRecorder()
		return sink, s.Submit(context.Background(), Request{Prompt: []int32{1}, MaxNewTokens: 200, TopLogprobs: -1, Sink: sink})
	}
	first, err1 := submit()
	second, err2 := submit()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if _, err := submit(); !errors.Is(err, ErrQueueFull) {
		t.Errorf("third request: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() { defer close(stopped); s.Run(ctx) }()
	first.wait(t)
	drained := s.Drain()
	if _, err := submit(); !errors.Is(err, ErrDraining) {
		t.Errorf("while draining: %v", err)
	}
	cancel()
	<-stopped
	second.wait(t)
	select {
	case <-drained:
	default:
		t.Error("not drained after the end")
	}
	for i, sink := range []*recorder{first, second} {
		if sink.dones != 1 {
			t.Errorf("request %d ended %d times", i, sink.dones)
		}
	}
	if first.result.Err != nil || len(first.tokens) != 200 || (second.result.Err == nil) != (len(second.tokens) == 200) {
		t.Errorf("results %+v, %+v", first.result.Err, second.result.Err)
	}
}

func TestSampler(t *testing.T) {
	logits := []float32{1, 4, 4, 2, -3}
	for name, test := range map[string]struct {
		sampling Sampling
		allowed  []int32
	}{
		"greedy takes the lowest of equals": {Sampling{TopP: 1}, []int32{1}},
		"top_k 1":                           {Sampling{Temperature: 1, TopP: 1, TopK: 1}, []int32{1}},
		"top_k 2":                           {Sampling{Temperature: 1, TopP: 1, TopK: 2}, []int32{1, 2}},
		"top_p keeps the fewest":            {Sampling{Temperature: 1, TopP: 0.45}, []int32{1}},
		"top_p of two":                      {Sampling{Temperature: 1, TopP: 0.9}, []int32{1, 2}},
		"hot":                               {Sampling{Temperature: 50, TopP: 1}, []int32{0, 1, 2, 3, 4}},
	} {
		t.Run(name, func(t *testing.T) {
			test.sampling.Seed = 7
			s := newSampler(test.sampling)
			seen := map[int32]bool{}
			for range 500 {
				seen[s.next(logits)] = true
			}
			for id := range int32(len(logits)) {
				if seen[id] != slices.Contains(test.allowed, id) {
					t.Errorf("token %d chosen: %v", id, seen[id])
				}
			}
		})
	}
}

// Frequencies must follow the probabilities.
func TestSamplerFrequencies(t *testing.T) {
	logits := []float32{0, float32(math.Log(3))}
	s := newSampler(Sampling{Temperature: 1, TopP: 1, Seed: 1})
	count := 0
	const draws = 20000
	for range draws {
		count += int(s.next(logits))
	}
	// 0.75 with a standard deviation of 0.003.
	if share := float64(count) / draws; share < 0.735 || share > 0.765 {
		t.Errorf("token of probability 0.75 drawn with frequency %v", share)
	}
}

func TestLogprobs(t *testing.T) {
	logits := []float32{0, float32(math.Log(2)), float32(math.Log(5))}
	got, top := logprobs(logits, 1, 2)
	if math.Abs(float64(got)-math.Log(2.0/8)) > 1e-6 {
		t.Errorf("log probability %v, want ln(2/8)", got)
	}
	if len(top) != 2 || top[0].ID != 2 || top[1].ID != 1 || top[1].Logprob != got || math.Abs(float64(top[0].Logprob)-math.Log(5.0/8)) > 1e-6 {
		t.Errorf("top %v", top)
	}
	if _, top := logprobs(logits, 1, 0); top != nil {
		t.Errorf("top 0 gives %v", top)
	}
}
