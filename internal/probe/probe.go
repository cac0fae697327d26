// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"context"
	"crypto/tls"
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
	// pollInterval is the interval between health checks. An engine needs longer to load its weights, so no restart is
	// missed.
	pollInterval = 2 * time.Second
	// healthLimit is the timeout of a health check. SGLang's health route generates a token and has a timeout of 20 s.
	healthLimit = 20 * time.Second
	// downTries is the number of consecutive failed health checks after which the engine counts as down. A busy engine
	// may miss a single check.
	downTries = 3
	// firstRetry and lastRetry are the minimum and maximum backoff after requests that the engine did not answer. The
	// backoff is doubled after each attempt.
	firstRetry, lastRetry = time.Second, 30 * time.Second
)

// Probe watches the engine of one pod. It is ready while the engine serves and has passed the check since it last
// started.
type Probe struct {
	client     *Client
	healthURL  string
	answers    *Answers
	ranks      int
	rankHeader string
	// poll and retry are pollInterval and firstRetry. Tests use shorter durations.
	poll, retry time.Duration
	ready       atomic.Bool
}

// NewProbe returns a probe that is not ready. The arguments are those of Check, and the path of the engine's health
// route.
func NewProbe(client *Client, healthPath string, answers *Answers, ranks int, rankHeader string) *Probe {
	return &Probe{
		client: client, healthURL: client.Address + healthPath, answers: answers, ranks: ranks, rankHeader: rankHeader,
		poll: pollInterval, retry: firstRetry,
	}
}

// ServeHTTP responds with 200 while the probe is ready, and with 503 while it is not.
func (p *Probe) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if !p.ready.Load() {
		http.Error(w, "the engine is not serving, or has not passed the lossless probe yet", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// Run waits until the engine serves, checks its answers, and keeps watching. An engine that was down has reloaded its
// weights and is checked again. Run returns a *DifferenceError, or the context's error when the context ends.
func (p *Probe) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	for {
		log.Info("Waiting for the engine", "url", p.healthURL)
		if err := p.waitHealthy(ctx, log); err != nil {
			return err
		}
		if err := p.check(ctx, log); err != nil {
			return err
		}
		p.ready.Store(true)
		log.Info("The outputs match the stored answers", "prompts", len(p.answers.Prompts), "ranks", p.ranks)
		err := p.waitDown(ctx)
		p.ready.Store(false)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		log.Info("The engine is down", "reason", err.Error())
	}
}

// waitHealthy returns nil when the engine serves, or the context's error. It logs once that the certificate of the engine
// cannot be verified: waiting does not change this.
func (p *Probe) waitHealthy(ctx context.Context, log logr.Logger) error {
	for reported := false; ; {
		err := p.health(ctx)
		if err == nil {
			return ctx.Err()
		}
		var unverified *tls.CertificateVerificationError
		if !reported && errors.As(err, &unverified) {
			log.Info("Failed to verify the certificate of the engine, retrying", "reason", err.Error())
			reported = true
		}
		if err := pause(ctx, p.poll); err != nil {
			return err
		}
	}
}

// waitDown waits until the engine is down and returns the reason, or the context's error.
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
		// If the connection is refused, no process is listening, so the engine is not just busy.
		if tries++; tries == downTries || errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
	}
}

// check repeats Check until the engine answers. It waits until the engine is healthy before each attempt, because
// requests to an engine that is loading weights fail.
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
		log.Info("Failed to check the engine, retrying", "reason", err.Error(), "seconds", wait.Seconds())
		if err := pause(ctx, wait); err != nil {
			return err
		}
		if err := p.waitHealthy(ctx, log); err != nil {
			return err
		}
	}
}

// health returns nil if the engine serves.
func (p *Probe) health(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.healthURL, nil)
	if err != nil {
		return err
	}
	response, err := cmp.Or(p.client.HTTP, transport).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	// Reading the whole body allows the connection to be reused.
	if _, err := io.CopyN(io.Discard, response.Body, maxResponseBytes); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the health route returned %s", response.Status)
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
