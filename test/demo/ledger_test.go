// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLedger(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for name, test := range map[string]struct {
		enter func(l *ledger)
		fails []string
	}{
		"no failure, no change":     {func(*ledger) {}, nil},
		"a failed request":          {func(l *ledger) { l.count(t.Context(), errors.New("502")) }, []string{"no request has failed"}},
		"a canceled request":        {func(l *ledger) { l.count(ended, errors.New("context canceled")) }, nil},
		"a different answer":        {func(l *ledger) { l.compare("a", []int{1, 3}) }, []string{"every repeated answer equals the first one"}},
		"a shorter answer":          {func(l *ledger) { l.compare("a", []int{1}) }, []string{"every repeated answer equals the first one"}},
		"same answer, other prompt": {func(l *ledger) { l.compare("b", []int{1, 2}) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger()
			for range 2 {
				l.count(t.Context(), nil)
				l.compare("a", []int{1, 2})
			}
			test.enter(l)
			if diff := cmp.Diff(test.fails, failing(l.checks())); diff != "" {
				t.Error(diff)
			}
		})
	}
	if got := failing(newLedger().checks()); len(got) != 2 {
		t.Errorf("failed checks without any request: %v, want 2", got)
	}
}
