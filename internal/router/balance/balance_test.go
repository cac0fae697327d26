// SPDX-License-Identifier: Apache-2.0

package balance_test

import (
	"math"
	"testing"

	"github.com/semmoe/operator/internal/router/balance"
	"github.com/semmoe/operator/internal/router/discovery"
)

func TestWindow(t *testing.T) {
	var w balance.Window
	if !math.IsNaN(w.Imbalance()) {
		t.Error("an imbalance without a request")
	}
	w.Add(balance.Arrival{Rank: discovery.NoRank, Tokens: 100})
	if !math.IsNaN(w.Imbalance()) {
		t.Error("a request without a rank counts")
	}
	w.Add(balance.Arrival{Ranks: 4, Tokens: 100})
	if got := w.Imbalance(); got != 4 {
		t.Errorf("one request on one of four ranks: %v, want 4", got)
	}
	for i := range balance.Requests {
		w.Add(balance.Arrival{Rank: i % 4, Ranks: 4, Tokens: 50})
	}
	if got := w.Imbalance(); got != 1 {
		t.Errorf("a window of equal loads: %v, want 1", got)
	}
}
