// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"
)

// reconciles counts a manager's reconciliations, and the panics in them, from its log. Metrics cannot be used, because
// all managers of a process share them.
type reconciles struct {
	started, panics atomic.Int64

	mu sync.Mutex
	// logged contains the latest entries of reconciliations at level 0, and errors.
	logged []string
}

const (
	// reconciling is the message that controller-runtime logs at reconcilingLevel when a reconciliation begins.
	reconciling      = "Reconciling"
	reconcilingLevel = 5
	// recovered is the suffix of the error that controller-runtime returns for a panic.
	recovered = "[recovered]"
	// reconcileKey is the key of a value that controller-runtime adds to the logger of each reconciliation.
	reconcileKey = "reconcileID"
	// keptEntries is the maximum number of entries of reconciliations.
	keptEntries = 20
)

// countingSink forwards log entries to LogSink and counts reconciliations and panics.
type countingSink struct {
	logr.LogSink
	counts *reconciles
	// inside reports that the entries are those of a reconciliation.
	inside bool
}

func (s *countingSink) Enabled(level int) bool {
	return level == reconcilingLevel || s.LogSink.Enabled(level)
}

func (s *countingSink) Info(level int, message string, pairs ...any) {
	if message == reconciling {
		s.counts.started.Add(1)
	}
	if level == 0 {
		s.keep(message, pairs)
	}
	if s.LogSink.Enabled(level) {
		s.LogSink.Info(level, message, pairs...)
	}
}

func (s *countingSink) Error(err error, message string, pairs ...any) {
	if err != nil && strings.HasSuffix(err.Error(), recovered) {
		s.counts.panics.Add(1)
	}
	s.keep(message, append([]any{"error", err}, pairs...))
	s.LogSink.Error(err, message, pairs...)
}

// keep records an entry of a reconciliation.
func (s *countingSink) keep(message string, pairs []any) {
	if !s.inside {
		return
	}
	s.counts.mu.Lock()
	defer s.counts.mu.Unlock()
	if s.counts.logged = append(s.counts.logged, fmt.Sprint(message, pairs)); len(s.counts.logged) > keptEntries {
		s.counts.logged = s.counts.logged[1:]
	}
}

func (s *countingSink) WithValues(pairs ...any) logr.LogSink {
	return &countingSink{s.LogSink.WithValues(pairs...), s.counts, s.inside || slices.Contains(pairs, any(reconcileKey))}
}

func (s *countingSink) WithName(name string) logr.LogSink {
	return &countingSink{s.LogSink.WithName(name), s.counts, s.inside}
}
