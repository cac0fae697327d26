// SPDX-License-Identifier: Apache-2.0

package installation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/corpus"
)

const (
	// dnsService is the address of CoreDNS, which this machine can reach like a pod.
	dnsService = "10.96.0.10:53"
	// clients is the number of concurrent clients. Each client opens a new connection for each request, like
	// independent clients.
	clients = 2
	// firstPort and ports define the source ports of the connections. The range is outside the system's ephemeral
	// ports.
	firstPort, ports = 10_000, 20_000
	// requestBytes is the approximate length of a prompt. heldOutPercent is the percentage of documents that the
	// clients send; the other documents are profiled.
	requestBytes   = 180
	heldOutPercent = 50
	splitSeed      = 1
	// dialTimeout is the timeout of a connection attempt.
	dialTimeout = 5 * time.Second
	// Traffic is healthy if, within the last quiet, no request has failed and at least quietAnswers requests have
	// started and succeeded.
	quiet, quietAnswers = 5 * time.Second, 20
	// slow is much longer than a response takes: a request that takes longer may be lost.
	slow = time.Second
)

// texts returns the documents for profiling (known) and for the requests (unknown).
func texts() (known, unknown []corpus.Request) {
	a, b := corpus.Split(corpus.Written(), heldOutPercent, splitSeed)
	return corpus.Requests(a, requestBytes), corpus.Requests(b, requestBytes)
}

// traffic sends requests to the model through DNS and its Service, with a pause of 30 ms between the requests of a
// client.
type traffic struct {
	client     *http.Client
	mu         sync.Mutex
	answered   []time.Time // start times of the successful requests
	failures   []failure
	inProgress [clients]time.Time // start time of each client's current request
}

// failure is a failed request: at is its start time, ended its end time.
type failure struct {
	at, ended time.Time
	err       error
}

// mark is a position in the traffic. A failure after the mark counts only if its request started at begun or later.
type mark struct {
	answered, failed int
	begun            time.Time
}

// start sends requests until the whole test ends.
func (s *traffic) start(parent *testing.T) {
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, dnsService)
	}}
	dialer := &dialer{Dialer: net.Dialer{Timeout: dialTimeout, Resolver: resolver}}
	s.client = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true}}
	_, prompts := texts()
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for first := range clients {
		all.Go(func() {
			for i := first; ctx.Err() == nil; i += clients {
				begin := s.begin(first)
				_, err := s.ask(prompts[i%len(prompts)].Text)
				s.count(begin, err)
				time.Sleep(30 * time.Millisecond)
			}
		})
	}
	parent.Cleanup(func() {
		stop()
		all.Wait()
	})
}

// dialer uses another source port for each connection. The node that forwards the requests keeps a conntrack entry for
// an unanswered connection for two minutes. A new connection from the same port follows this entry, even after the
// Service no longer contains the address: kube-proxy deletes conntrack entries only for UDP. All requests come from one
// address, so a source port could recur within two minutes. Clients with many addresses do not have this problem.
type dialer struct {
	net.Dialer
	made atomic.Uint32
}

func (d *dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	for {
		once := d.Dialer
		once.LocalAddr = &net.TCPAddr{Port: firstPort + int(d.made.Add(1)%ports)}
		connection, err := once.DialContext(ctx, network, address)
		if !errors.Is(err, syscall.EADDRINUSE) { // another program of the machine has the port
			return connection, err
		}
	}
}

// answer is the response to a prompt. plan is the digest of the plan that routed the request, empty without a plan.
type answer struct{ text, plan string }

// ask sends a prompt. It returns an error unless the response is complete.
func (s *traffic) ask(prompt string) (answer, error) {
	body, err := json.Marshal(map[string]any{"model": "Qwen/Qwen3-30B-A3B", "prompt": prompt, "max_tokens": 4, "temperature": 0})
	if err != nil {
		return answer{}, err
	}
	response, err := s.client.Post(fmt.Sprintf("http://%s.%s.svc.cluster.local:8000/v1/completions", model, team), "application/json", bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return answer{}, err
	}
	if response.StatusCode != http.StatusOK {
		return answer{}, fmt.Errorf("%s: %.300s", response.Status, text)
	}
	var completion struct {
		Choices []struct {
			Text string `json:"text"` // may be empty if the model ends immediately
		}
		Usage struct {
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	if err := json.Unmarshal(text, &completion); err != nil || completion.Usage.CompletionTokens == 0 || len(completion.Choices) != 1 {
		return answer{}, fmt.Errorf("the response is %.300s: %v", text, err)
	}
	return answer{completion.Choices[0].Text, response.Header.Get(router.HeaderPlan)}, nil
}

func (s *traffic) begin(client int) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inProgress[client] = time.Now()
	return s.inProgress[client]
}

// settle waits until no request is in progress that started before the given time.
func (s *traffic) settle(t *testing.T, moment time.Time) {
	t.Helper()
	eventually(t, waitTimeout, "end of earlier requests", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, begin := range s.inProgress {
			if begin.Before(moment) {
				return fmt.Errorf("a request has been in progress for %s", seconds(time.Since(begin)))
			}
		}
		return nil
	})
}

func (s *traffic) count(begin time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.answered = append(s.answered, begin)
		return
	}
	s.failures = append(s.failures, failure{begin, time.Now(), err})
}

func (s *traffic) mark() mark {
	s.mu.Lock()
	defer s.mu.Unlock()
	return mark{answered: len(s.answered), failed: len(s.failures)}
}

// since returns the number of successful requests and the failed requests after the mark.
func (s *traffic) since(m mark) (int, []failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed := slices.DeleteFunc(slices.Clone(s.failures[m.failed:]), func(f failure) bool { return f.at.Before(m.begun) })
	return len(s.answered) - m.answered, failed
}

// healthy returns an error unless the traffic is healthy over the last quiet, which must start after since: no request
// has failed, no request takes longer than slow, and at least quietAnswers requests that started in this time have
// succeeded. It compares the end times of failures, because a failed request may have started long before.
func (s *traffic) healthy(since, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	begin := now.Add(-quiet)
	if begin.Before(since) {
		return fmt.Errorf("only %s have elapsed", seconds(now.Sub(since)))
	}
	for _, f := range s.failures {
		if f.ended.After(begin) {
			return fmt.Errorf("a request failed %s ago: %w", seconds(now.Sub(f.ended)), f.err)
		}
	}
	for _, begun := range s.inProgress {
		if now.Sub(begun) > slow {
			return fmt.Errorf("a request has been in progress for %s", seconds(now.Sub(begun)))
		}
	}
	answered := 0
	for _, begun := range s.answered {
		if begun.After(begin) {
			answered++
		}
	}
	if answered < quietAnswers {
		return fmt.Errorf("%d requests of the last %v succeeded, want %d", answered, quiet, quietAnswers)
	}
	return nil
}

// expectHealthy waits until the given number of further requests have succeeded. It fails the test if a request has
// failed since the mark.
func (s *traffic) expectHealthy(t *testing.T, from mark, more int) {
	t.Helper()
	now := s.mark()
	eventually(t, waitTimeout, "successful requests", func() error {
		if answered, _ := s.since(now); answered < more {
			return fmt.Errorf("%d requests succeeded, want %d", answered, more)
		}
		return nil
	})
	answered, failed := s.since(from)
	if len(failed) > 0 {
		t.Errorf("%d of %d requests failed; first error: %v", len(failed), answered+len(failed), failed[0].err)
	}
	t.Logf("%d requests succeeded in this step, %d failed", answered, len(failed))
}

func TestRequestLosses(t *testing.T) {
	now := time.Now()
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	timeout := func(ended time.Duration) failure {
		return failure{ago(ended + dialTimeout), ago(ended), errors.New("i/o timeout")}
	}
	many := slices.Repeat([]time.Time{ago(time.Second)}, quietAnswers)
	young := [clients]time.Time{ago(slow / 2), ago(slow / 2)}
	for name, c := range map[string]struct {
		traffic *traffic
		since   time.Duration
		want    string
	}{
		"successful requests":              {&traffic{answered: many, inProgress: young}, time.Minute, ""},
		"success after the last failure":   {&traffic{answered: many, inProgress: young, failures: []failure{timeout(2 * quiet)}}, time.Minute, ""},
		"shorter than quiet":               {&traffic{answered: many, inProgress: young}, quiet / 2, "2.5 s have elapsed"},
		"no successful request":            {&traffic{inProgress: young}, time.Minute, "0 requests"},
		"only earlier successful requests": {&traffic{answered: slices.Repeat([]time.Time{ago(2 * quiet)}, 1000), inProgress: young}, time.Minute, "0 requests"},
		"recent connection timeout":        {&traffic{answered: many, inProgress: young, failures: []failure{timeout(0)}}, time.Minute, "i/o timeout"},
		"recent timeout listed first":      {&traffic{answered: many, inProgress: young, failures: []failure{timeout(0), timeout(2 * quiet)}}, time.Minute, "i/o timeout"},
		"request in progress for too long": {&traffic{answered: many, inProgress: [clients]time.Time{ago(2 * slow), ago(0)}}, time.Minute, "in progress for 2.0 s"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.traffic.healthy(ago(c.since), now)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}
