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

	"github.com/semmoe/operator/test/corpus"
)

const (
	// dnsService is CoreDNS, which the machine reaches as pods do.
	dnsService = "10.96.0.10:53"
	// clients ask at a time. Each makes a connection for each request, as clients do that know nothing of each other.
	clients = 2
	// The requests' connections come from ports that the system chooses for nobody.
	firstPort, ports = 10_000, 20_000
	// requestBytes is about how long a prompt is; heldOutPercent of the documents are asked for, the others profiled.
	requestBytes   = 180
	heldOutPercent = 50
	splitSeed      = 1
	// dialTimeout is how long a connection may take.
	dialTimeout = 5 * time.Second
	// Requests are unharmed when for so long none has failed, and so many were answered that have begun within it.
	quiet, quietAnswers = 5 * time.Second, 20
	// slow is far more than an answer takes: a request that is under way for longer may be lost.
	slow = time.Second
)

// texts are what is profiled, and what is asked.
func texts() (known, unknown []corpus.Request) {
	a, b := corpus.Split(corpus.Written(), heldOutPercent, splitSeed)
	return corpus.Requests(a, requestBytes), corpus.Requests(b, requestBytes)
}

// traffic asks the model through DNS and its Service, without a pause for longer than a moment.
type traffic struct {
	mu       sync.Mutex
	answered []time.Time // when those have begun
	failures []failure
	underWay [clients]time.Time // when each client's request has begun
}

// failure is a request that has begun at a time, and was given up at another.
type failure struct {
	at, ended time.Time
	err       error
}

// mark is a moment in the traffic. What fails after it counts only if it has begun at a time or later.
type mark struct {
	answered, failed int
	begun            time.Time
}

// start asks until the whole test ends.
func (s *traffic) start(whole *testing.T, url string) {
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, dnsService)
	}}
	dialer := &dialer{Dialer: net.Dialer{Timeout: dialTimeout, Resolver: resolver}}
	asking := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true}}
	_, prompts := texts()
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for first := range clients {
		all.Go(func() {
			for i := first; ctx.Err() == nil; i += clients {
				begin := s.begin(first)
				s.count(begin, ask(asking, url, prompts[i%len(prompts)].Text))
				time.Sleep(30 * time.Millisecond)
			}
		})
	}
	whole.Cleanup(func() {
		stop()
		all.Wait()
	})
}

// dialer connects from another port each time. The node through which the requests go remembers for two minutes where a connection that
// was not answered has led, and sends there whatever comes from the same port, although no request is to go to that address any more:
// kube-proxy makes it forget datagrams only. All requests come from one address, and a port of theirs would come back within that time,
// as it would not with clients of many addresses.
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

// ask returns an error unless the prompt is answered in full.
func ask(asking *http.Client, url, prompt string) error {
	body, err := json.Marshal(map[string]any{"model": "Qwen/Qwen3-30B-A3B", "prompt": prompt, "max_tokens": 4, "temperature": 0})
	if err != nil {
		return err
	}
	response, err := asking.Post(url+"/v1/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %.300s", response.Status, text)
	}
	var answer struct { // its text may be empty: a model that ends at once has answered
		Usage struct {
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	if err := json.Unmarshal(text, &answer); err != nil || answer.Usage.CompletionTokens == 0 {
		return fmt.Errorf("the answer is %.300s: %v", text, err)
	}
	return nil
}

func (s *traffic) begin(client int) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.underWay[client] = time.Now()
	return s.underWay[client]
}

// settle waits until no request is under way that has begun before a moment.
func (s *traffic) settle(t *testing.T, moment time.Time) {
	t.Helper()
	eventually(t, patience, "requests from before end", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, begin := range s.underWay {
			if begin.Before(moment) {
				return fmt.Errorf("one is under way for %s", seconds(time.Since(begin)))
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

// since is how many requests were answered since the mark, and which have failed.
func (s *traffic) since(m mark) (int, []failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed := slices.DeleteFunc(slices.Clone(s.failures[m.failed:]), func(f failure) bool { return f.at.Before(m.begun) })
	return len(s.answered) - m.answered, failed
}

// unharmed returns an error unless requests are answered: none has failed, or waits, and enough were answered of those that have begun
// since the quiet time began, all of it after a moment. That a request fails is known when it ends, which may be long after it has begun.
func (s *traffic) unharmed(since, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	begin := now.Add(-quiet)
	if begin.Before(since) {
		return fmt.Errorf("only %s have passed", seconds(now.Sub(since)))
	}
	for _, f := range s.failures {
		if f.ended.After(begin) {
			return fmt.Errorf("a request failed %s ago: %w", seconds(now.Sub(f.ended)), f.err)
		}
	}
	for _, begun := range s.underWay {
		if now.Sub(begun) > slow {
			return fmt.Errorf("a request is under way for %s", seconds(now.Sub(begun)))
		}
	}
	answered := 0
	for _, begun := range s.answered {
		if begun.After(begin) {
			answered++
		}
	}
	if answered < quietAnswers {
		return fmt.Errorf("%d requests of the last %v were answered, want %d", answered, quiet, quietAnswers)
	}
	return nil
}

// expectUnharmed waits until so many more requests were answered, and fails where one has failed since the mark.
func (s *traffic) expectUnharmed(t *testing.T, from mark, more int) {
	t.Helper()
	now := s.mark()
	eventually(t, patience, "the model answers", func() error {
		if answered, _ := s.since(now); answered < more {
			return fmt.Errorf("%d requests were answered, want %d", answered, more)
		}
		return nil
	})
	answered, failed := s.since(from)
	if len(failed) > 0 {
		t.Errorf("%d of %d requests failed, the first: %v", len(failed), answered+len(failed), failed[0].err)
	}
	t.Logf("%d requests were answered in this step, %d failed", answered, len(failed))
}

func TestUnharmed(t *testing.T) {
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
		"answered":                        {&traffic{answered: many, underWay: young}, time.Minute, ""},
		"answered since the last failure": {&traffic{answered: many, underWay: young, failures: []failure{timeout(2 * quiet)}}, time.Minute, ""},
		"too soon":                        {&traffic{answered: many, underWay: young}, quiet / 2, "2.5 s have passed"},
		"nothing answered":                {&traffic{underWay: young}, time.Minute, "0 requests"},
		"answered before":                 {&traffic{answered: slices.Repeat([]time.Time{ago(2 * quiet)}, 1000), underWay: young}, time.Minute, "0 requests"},
		"a connection just given up":      {&traffic{answered: many, underWay: young, failures: []failure{timeout(0)}}, time.Minute, "i/o timeout"},
		"given up before another failed":  {&traffic{answered: many, underWay: young, failures: []failure{timeout(0), timeout(2 * quiet)}}, time.Minute, "i/o timeout"},
		"one that hangs":                  {&traffic{answered: many, underWay: [clients]time.Time{ago(2 * slow), ago(0)}}, time.Minute, "under way for 2.0 s"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.traffic.unharmed(ago(c.since), now)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}
