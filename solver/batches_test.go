// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"math"
	"reflect"
	"testing"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
)

// A window has whole documents of the train requests, drawn with replacement, and as many requests as the variance of
// the difference between a step and the profile requires.
func TestWindowsResampleDocuments(t *testing.T) {
	recorded := openTiny(t)
	for _, c := range []struct {
		attention placement.Attention
		sizes     []int
	}{{placement.DataParallel, nil}, {placement.TensorParallel, []int{4096, 16384, 65536}}, {placement.TensorParallel, []int{1}}} {
		s, err := newSearch(recorded, Options{
			Ranks: 8, Attention: c.attention, Algorithm: placement.Auto, Forecast: Table, TrainPercent: 50, Seed: 1, BatchTokens: c.sizes,
		})
		if err != nil {
			t.Fatal(err)
		}
		n, step := float64(len(s.train)), float64(dispatch.Arrivals)
		if c.attention == placement.TensorParallel {
			step = float64(c.sizes[len(c.sizes)/2]) * n / float64(s.trace.TokenCount(s.train))
		}
		want := step * n / (step + n)
		const count = 64
		documents := s.windows(count)
		drawn, largest, requests, repeated := make([]float64, count), 0.0, 0, false
		for _, d := range documents {
			requests += len(d.requests)
			largest = max(largest, float64(len(d.requests)))
			for i, w := range d.windows {
				drawn[w] += float64(len(d.requests))
				repeated = repeated || i > 0 && d.windows[i-1] == w
			}
			for _, r := range d.requests {
				if recorded.Documents[r] != recorded.Documents[d.requests[0]] {
					t.Errorf("request %d is with another document", r)
				}
			}
		}
		if requests != len(s.train) {
			t.Errorf("attention %s: the documents have %d requests; want %d", c.attention, requests, len(s.train))
		}
		for w, of := range drawn {
			if of < want || of >= math.Ceil(want)+largest {
				t.Errorf("attention %s: window %d has %v requests; want %v and at most a document more", c.attention, w, of, want)
			}
		}
		if want > 30 && !repeated {
			t.Errorf("attention %s: no window contains a document twice", c.attention)
		}
		if !reflect.DeepEqual(documents, s.windows(count)) {
			t.Errorf("attention %s: windows differ between two calls", c.attention)
		}
	}
}
