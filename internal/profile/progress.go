package profile

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

// ProgressPath is where a profiling process tells how far it is, as a ProgressReport.
const ProgressPath = "/v1/progress"

// Phase is what a run does.
type Phase string

// The phases of a run, in their order.
const (
	WaitingForEngine Phase = "WaitingForEngine"
	Recording        Phase = "Recording"
	Storing          Phase = "Storing"
)

// Progress is how far a run is.
type Progress struct {
	Phase Phase
	// Done of Total requests have been answered or refused, with Tokens of at most TokensTotal tokens, in Elapsed.
	Done, Total, Tokens, TokensTotal int
	Elapsed                          time.Duration
}

// TokensPerSecond is the mean rate so far.
func (p Progress) TokensPerSecond() float64 {
	if p.Elapsed <= 0 {
		return 0
	}
	return float64(p.Tokens) / p.Elapsed.Seconds()
}

// Remaining estimates how long the rest takes: a run ends with its requests or with its tokens, whichever comes first. It
// is 0 while nothing is known.
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

// ProgressReport is Progress as it is told to others.
type ProgressReport struct {
	Phase            Phase `json:"phase"`
	RequestsDone     int   `json:"requestsDone"`
	RequestsTotal    int   `json:"requestsTotal"`
	Tokens           int   `json:"tokens"`
	TokensPerSecond  int   `json:"tokensPerSecond"`
	RemainingSeconds int   `json:"remainingSeconds"`
}

// Report is how p is told.
func (p Progress) Report() ProgressReport {
	return ProgressReport{
		Phase: p.Phase, RequestsDone: p.Done, RequestsTotal: p.Total, Tokens: p.Tokens,
		TokensPerSecond: int(p.TokensPerSecond()), RemainingSeconds: int(p.Remaining().Seconds()),
	}
}

// Board holds the latest progress and answers questions for it at ProgressPath.
type Board struct {
	mu     sync.Mutex
	latest Progress
}

// Set takes over a progress.
func (b *Board) Set(p Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.latest = p
}

func (b *Board) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != ProgressPath || r.Method != http.MethodGet {
		http.NotFound(w, r)
		return
	}
	b.mu.Lock()
	report := b.latest.Report()
	b.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(report) // a client that went away
}
