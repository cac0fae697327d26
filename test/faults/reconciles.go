package faults

import (
	"strings"
	"sync/atomic"

	"github.com/go-logr/logr"
)

// reconciles counts a manager's reconciliations, and the panics in them, from what it logs: the metrics are shared by all
// managers of a process.
type reconciles struct {
	begun, panics atomic.Int64
}

const (
	// reconciling is what controller-runtime says at reconcilingLevel when a reconciliation begins.
	reconciling      = "Reconciling"
	reconcilingLevel = 5
	// recovered ends the error that it makes of a panic.
	recovered = "[recovered]"
)

// countingSink hands on what a manager logs, and counts.
type countingSink struct {
	logr.LogSink
	counts *reconciles
}

func (s *countingSink) Enabled(level int) bool {
	return level == reconcilingLevel || s.LogSink.Enabled(level)
}

func (s *countingSink) Info(level int, message string, pairs ...any) {
	if message == reconciling {
		s.counts.begun.Add(1)
	}
	if s.LogSink.Enabled(level) {
		s.LogSink.Info(level, message, pairs...)
	}
}

func (s *countingSink) Error(err error, message string, pairs ...any) {
	if err != nil && strings.HasSuffix(err.Error(), recovered) {
		s.counts.panics.Add(1)
	}
	s.LogSink.Error(err, message, pairs...)
}

func (s *countingSink) WithValues(pairs ...any) logr.LogSink {
	return &countingSink{s.LogSink.WithValues(pairs...), s.counts}
}

func (s *countingSink) WithName(name string) logr.LogSink {
	return &countingSink{s.LogSink.WithName(name), s.counts}
}
