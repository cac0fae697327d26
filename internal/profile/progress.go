// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

// ProgressPath is the HTTP path at which a profiling process returns its progress, as a ProgressReport.
const ProgressPath = "/v1/progress"

// Phase is the phase of a run.
type Phase string

// The phases of a run, in order.
const (
	WaitingForEngine Phase = "WaitingForEngine"
	Recording        Phase = "Recording"
	Storing          Phase = "Storing"
)

// Progress is the progress of a run.
type Progress struct {
	Phase Phase
	// Done of Total requests were completed or rejected, with Tokens of at most TokensTotal tokens, in Elapsed.
	Done, Total, Tokens, TokensTotal int
	Elapsed                          time.Duration
}

// TokensPerSecond returns the mean rate since the start of the phase.
func (p Progress) TokensPerSecond() float64 {
	if p.Elapsed <= 0 {
		return 0
	}
	return float64(p.Tokens) / p.Elapsed.Seconds()
}

// Remaining estimates the remaining time. A run ends when all requests are done or the token limit is reached,
// whichever is first. The result is 0 before the first request is done.
func (p Progress) Remaining() time.Duration {
	if p.Phase == Storing || p.Done == 0 || p.Total == 0 || p.TokensTotal == 0 {
		return 0
	}
	done := max(float64(p.Done)/float64(p.Total), float64(p.Tokens)/float64(p.TokensTotal))
	if done >= 1 {
		return 0
	}
	return time.Duration(float64(p.Elapsed) * (1 - done) / done).Round(time.Second)
}

// ProgressReport is the JSON form of Progress.
type ProgressReport struct {
	Phase            Phase `json:"phase"`
	RequestsDone     int   `json:"requestsDone"`
	RequestsTotal    int   `json:"requestsTotal"`
	Tokens           int   `json:"tokens"`
	TokensPerSecond  int   `json:"tokensPerSecond"`
	RemainingSeconds int   `json:"remainingSeconds"`
}

// Report returns the JSON form of p.
func (p Progress) Report() ProgressReport {
	return ProgressReport{
		Phase: p.Phase, RequestsDone: p.Done, RequestsTotal: p.Total, Tokens: p.Tokens,
		TokensPerSecond: int(p.TokensPerSecond()), RemainingSeconds: int(p.Remaining().Seconds()),
	}
}

// ProgressHandler stores the latest progress and serves it at ProgressPath.
type ProgressHandler struct {
	mu     sync.Mutex
	latest Progress
}

// Set stores the latest progress.
func (b *ProgressHandler) Set(p Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.latest = p
}

func (b *ProgressHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != ProgressPath || r.Method != http.MethodGet {
		http.NotFound(w, r)
		return
	}
	b.mu.Lock()
	report := b.latest.Report()
	b.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(report) // the client may have disconnected
}
