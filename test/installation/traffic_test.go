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
)

// texts are what is profiled, and what is asked.
func texts() (known, unknown []corpus.Request) {
	a, b := corpus.Split(corpus.Written(), heldOutPercent, splitSeed)
	return corpus.Requests(a, requestBytes), corpus.Requests(b, requestBytes)
}

// traffic asks the model through DNS and its Service, without a pause for longer than a moment.
type traffic struct {
	mu       sync.Mutex
	answered int
	failures []failure
	underWay [clients]time.Time // when each client's request has begun
}

type failure struct {
	at  time.Time
	err error
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
	dialer := &dialer{Dialer: net.Dialer{Timeout: 5 * time.Second, Resolver: resolver}}
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
		s.answered++
		return
	}
	s.failures = append(s.failures, failure{begin, err})
}

func (s *traffic) mark() mark {
	s.mu.Lock()
	defer s.mu.Unlock()
	return mark{answered: s.answered, failed: len(s.failures)}
}

// since is how many requests were answered since the mark, and which have failed.
func (s *traffic) since(m mark) (int, []failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed := slices.DeleteFunc(slices.Clone(s.failures[m.failed:]), func(f failure) bool { return f.at.Before(m.begun) })
	return s.answered - m.answered, failed
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
