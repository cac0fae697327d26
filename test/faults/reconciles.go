package faults

import (
	"strings"
	"sync/atomic"

	"github.com/go-logr/logr"
)

// reconciles counts a manager's reconciliations, and the panics in them, from its log. Metrics cannot be used, because
// all managers of a process share them.
type reconciles struct {
	started, panics atomic.Int64
}

const (
	// reconciling is the message that controller-runtime logs at reconcilingLevel when a reconciliation begins.
	reconciling      = "Reconciling"
	reconcilingLevel = 5
	// recovered is the suffix of the error that controller-runtime returns for a panic.
	recovered = "[recovered]"
)

// countingSink forwards log entries to LogSink and counts reconciliations and panics.
type countingSink struct {
	logr.LogSink
	counts *reconciles
}

func (s *countingSink) Enabled(level int) bool {
	return level == reconcilingLevel || s.LogSink.Enabled(level)
}

func (s *countingSink) Info(level int, message string, pairs ...any) {
	if message == reconciling {
		s.counts.started.Add(1)
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
