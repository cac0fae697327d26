package lossless

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-logr/logr"
)

const (
	// pollInterval is how often the engine's health is looked at: an engine needs longer than that to load its weights
	// anew, so that none restarts unseen.
	pollInterval = 2 * time.Second
	// healthLimit bounds one look. SGLang's health route generates a token, and gives up after 20 s itself.
	healthLimit = 20 * time.Second
	// downTries is how often in a row an engine must fail to be healthy before it counts as down: a busy one may miss one.
	downTries = 3
	// firstRetry and lastRetry bound the pause after requests that the engine did not answer; it doubles from one to the
	// other.
	firstRetry, lastRetry = time.Second, 30 * time.Second
)

// Probe watches the engine of one pod: it is ready while the engine serves and has passed the check since it began to.
type Probe struct {
	client     *Client
	healthURL  string
	answers    *Answers
	ranks      int
	rankHeader string
	// poll and retry are pollInterval and firstRetry, but in tests.
	poll, retry time.Duration
	ready       atomic.Bool
}

// NewProbe returns a probe that is not ready. The arguments are those of Check, and the path of the engine's health route.
func NewProbe(client *Client, healthPath string, answers *Answers, ranks int, rankHeader string) *Probe {
	return &Probe{
		client: client, healthURL: client.Address + healthPath, answers: answers, ranks: ranks, rankHeader: rankHeader,
		poll: pollInterval, retry: firstRetry,
	}
}

// ServeHTTP answers 200 while the probe is ready, else 503.
func (p *Probe) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if !p.ready.Load() {
		http.Error(w, "the engine does not serve, or has not passed the lossless probe yet", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// Run waits until the engine serves, checks its answers, and goes on watching: an engine that was away has loaded its
// weights anew, and is checked again. It returns a *DifferenceError, or the context's error when that ends.
func (p *Probe) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	for {
		log.Info("Waiting for the engine", "url", p.healthURL)
		if err := p.waitHealthy(ctx); err != nil {
			return err
		}
		if err := p.check(ctx, log); err != nil {
			return err
		}
		p.ready.Store(true)
		log.Info("The outputs are those of the unplanned start", "prompts", len(p.answers.Prompts), "ranks", p.ranks)
		err := p.waitDown(ctx)
		p.ready.Store(false)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		log.Info("The engine is down", "reason", err.Error())
	}
}

// waitHealthy returns when the engine serves, or the context's error.
func (p *Probe) waitHealthy(ctx context.Context) error {
	for p.health(ctx) != nil {
		if err := pause(ctx, p.poll); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// waitDown returns why the engine is down, once it is, or the context's error.
func (p *Probe) waitDown(ctx context.Context) error {
	for tries := 0; ; {
		if err := pause(ctx, p.poll); err != nil {
			return err
		}
		err := p.health(ctx)
		if err == nil {
			tries = 0
			continue
		}
		// Where nobody listens, there is no engine that could be busy.
		if tries++; tries == downTries || errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
	}
}

// check repeats Check until the engine answers. That it is healthy is looked at each time: requests to one that is just
// loading weights tell nothing.
func (p *Probe) check(ctx context.Context, log logr.Logger) error {
	for wait := p.retry; ; wait = min(2*wait, lastRetry) {
		err := Check(ctx, p.client, p.answers, p.ranks, p.rankHeader)
		var difference *DifferenceError
		if err == nil || errors.As(err, &difference) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		log.Info("The engine cannot be checked; trying again", "reason", err.Error(), "seconds", wait.Seconds())
		if err := pause(ctx, wait); err != nil {
			return err
		}
		if err := p.waitHealthy(ctx); err != nil {
			return err
		}
	}
}

// health is nil if the engine serves.
func (p *Probe) health(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.healthURL, nil)
	if err != nil {
		return err
	}
	response, err := transport.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	// A body that was read leaves the connection for the next look.
	if _, err := io.CopyN(io.Discard, response.Body, maxResponseBytes); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("its health is %s", response.Status)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
