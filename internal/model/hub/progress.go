// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"encoding/json"
	"net/http"
	"sync/atomic"

	"github.com/semmoe/operator/internal/model/hub/report"
)

// Progress is the progress of a run. Its zero value is the start.
type Progress struct {
	phase atomic.Value
	// files and bytes are complete, of totalFiles and totalBytes. received is the number of bytes that this run received.
	files, totalFiles, bytes, totalBytes, received atomic.Int64
}

func (p *Progress) setPhase(phase report.Phase) { p.phase.Store(phase) }

func (p *Progress) start(files int, bytes int64) {
	p.totalFiles.Store(int64(files))
	p.totalBytes.Store(bytes)
	p.setPhase(report.Downloading)
}

func (p *Progress) receive(n int) {
	p.bytes.Add(int64(n))
	p.received.Add(int64(n))
}

// Report returns the current state.
func (p *Progress) Report() report.Progress {
	phase, _ := p.phase.Load().(report.Phase)
	return report.Progress{
		Phase: phase, Bytes: p.bytes.Load(), TotalBytes: p.totalBytes.Load(), Files: int(p.files.Load()), TotalFiles: int(p.totalFiles.Load()),
	}
}

// ServeHTTP serves the progress at report.ProgressPath.
func (p *Progress) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != report.ProgressPath || r.Method != http.MethodGet {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(p.Report()) // the client may have disconnected
}
