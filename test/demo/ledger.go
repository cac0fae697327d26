// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// ledger records all requests of the demo. No action of the operator may fail a request or change an answer.
type ledger struct {
	mu sync.Mutex
	// sent is the number of requests, failed the number of requests without an answer, failure the error of the first
	// of these.
	sent, failed int
	failure      error
	// first holds the first answer to each prompt. again counts answers to repeated prompts, changed those of them that
	// differ from the first answer.
	first          map[string][]int
	again, changed int
}

func newLedger() *ledger { return &ledger{first: map[string][]int{}} }

// count records a request. A request that is canceled because the demo ends does not count as failed.
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

// compare records the answer to a prompt, as token IDs, and compares it with the first answer to the same prompt.
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

// checks returns the checks of all requests so far.
func (l *ledger) checks() []check {
	l.mu.Lock()
	defer l.mu.Unlock()
	failures := fmt.Sprintf("%d of %d", l.failed, l.sent)
	if l.failure != nil {
		failures += ", the first: " + l.failure.Error()
	}
	return []check{
		{"no request has failed", l.sent > 0 && l.failed == 0, failures},
		{"every repeated answer equals the first one", l.again > 0 && l.changed == 0,
			fmt.Sprintf("%d of %d repeated answers to %d prompts, token by token", l.again-l.changed, l.again, len(l.first))},
	}
}
