// SPDX-License-Identifier: Apache-2.0

// Package report contains the JSON that a download reports: its progress, and its result.
package report

// ProgressPath is the HTTP path at which a download returns its progress, as Progress.
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

// Progress is the progress of a download.
type Progress struct {
	Phase      Phase `json:"phase"`
	Bytes      int64 `json:"bytes"`
	TotalBytes int64 `json:"totalBytes"`
	Files      int   `json:"files"`
	TotalFiles int   `json:"totalFiles"`
}

// Result describes a complete download.
type Result struct {
	Repo   string `json:"repo"`
	Commit string `json:"commit"`
	// Files and Bytes are the number and the size of all files; Downloaded is the number of bytes that this run received.
	Files      int   `json:"files"`
	Bytes      int64 `json:"bytes"`
	Downloaded int64 `json:"downloaded"`
	// Found reports whether the directory was complete before.
	Found   bool    `json:"found,omitempty"`
	Seconds float64 `json:"seconds"`
}
