package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// ledger is kept of all requests of the demo: nothing that the operator does may cost one, or change what is answered.
type ledger struct {
	mu sync.Mutex
	// sent counts requests, failed those that were not answered, and failure is why the first of them was not.
	sent, failed int
	failure      error
	// first is the first answer to each prompt. again counts further answers to a prompt that was sent before, changed those
	// of them that were another.
	first          map[string][]int
	again, changed int
}

func newLedger() *ledger { return &ledger{first: map[string][]int{}} }

// count enters a request. What is broken off because the demo ends has not failed.
func (l *ledger) count(ctx context.Context, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent++
	if err == nil || ctx.Err() != nil {
		return
	}
	l.failed++
	if l.failure == nil {
		l.failure = err
	}
}

// compare enters the answer to a prompt, as token ids.
func (l *ledger) compare(prompt string, output []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, known := l.first[prompt]
	if !known {
		l.first[prompt] = output
		return
	}
	l.again++
	if !slices.Equal(before, output) {
		l.changed++
	}
}

// checks are of all requests until now.
func (l *ledger) checks() []check {
	l.mu.Lock()
	defer l.mu.Unlock()
	failures := fmt.Sprintf("%d of %d", l.failed, l.sent)
	if l.failure != nil {
		failures += ", the first: " + l.failure.Error()
	}
	return []check{
		{"no request has failed", l.sent > 0 && l.failed == 0, failures},
		{"every answer is that given before", l.again > 0 && l.changed == 0,
			fmt.Sprintf("%d of %d answers to %d prompts, token for token", l.again-l.changed, l.again, len(l.first))},
	}
}
