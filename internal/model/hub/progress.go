// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"encoding/json"
	"net/http"
	"sync/atomic"
)

// ProgressPath is the HTTP path at which a download returns its progress, as a ProgressReport.
const ProgressPath = "/v1/progress"

// Phase is the phase of a run.
type Phase string

// The phases of a run, in order.
const (
	// Waiting is the phase in which another run downloads into the same directory.
	Waiting     Phase = "Waiting"
	Listing     Phase = "Listing"
	Downloading Phase = "Downloading"
	Publishing  Phase = "Publishing"
)

// Progress is the progress of a run. Its zero value is the start.
type Progress struct {
	phase atomic.Value
	// files and bytes are complete, of totalFiles and totalBytes. received is the number of bytes that this run received.
	files, totalFiles, bytes, totalBytes, received atomic.Int64
}

// ProgressReport is the JSON form of Progress.
type ProgressReport struct {
	Phase      Phase `json:"phase"`
	Bytes      int64 `json:"bytes"`
	TotalBytes int64 `json:"totalBytes"`
	Files      int   `json:"files"`
	TotalFiles int   `json:"totalFiles"`
}

func (p *Progress) setPhase(phase Phase) { p.phase.Store(phase) }

func (p *Progress) start(files int, bytes int64) {
	p.totalFiles.Store(int64(files))
	p.totalBytes.Store(bytes)
	p.setPhase(Downloading)
}

func (p *Progress) receive(n int) {
	p.bytes.Add(int64(n))
	p.received.Add(int64(n))
}

// Report returns the current state.
func (p *Progress) Report() ProgressReport {
	phase, _ := p.phase.Load().(Phase)
	return ProgressReport{
		Phase: phase, Bytes: p.bytes.Load(), TotalBytes: p.totalBytes.Load(), Files: int(p.files.Load()), TotalFiles: int(p.totalFiles.Load()),
	}
}

// ServeHTTP serves the progress at ProgressPath.
func (p *Progress) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != ProgressPath || r.Method != http.MethodGet {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(p.Report()) // the client may have disconnected
}
