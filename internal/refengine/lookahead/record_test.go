// SPDX-License-Identifier: Apache-2.0

package lookahead

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/solver/trace"
)

var loadTiny = sync.OnceValues(func() (*model.Model, error) {
	c, err := checkpoint.Open("../testdata/tiny-qwen3moe")
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return model.Load(c, 0)
})

// recorded returns a small part of a real trace, and its model.
func recorded(t *testing.T) (*model.Model, *trace.Trace) {
	t.Helper()
	m, err := loadTiny()
	if err != nil {
		t.Fatal(err)
	}
	whole, err := trace.Open(t.Context(), "../../../solver/testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	return m, whole.Subset([]int{3, 11, 30})
}

func TestRecord(t *testing.T) {
	m, tr := recorded(t)
	routes := slices.Clone(tr.Experts)
	a, agreement, err := Record(t.Context(), m, tr, Options{Width: 8, Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	tr.LookAhead = a
	if err := tr.Validate(); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(routes, tr.Experts) {
		t.Error("the routes have changed")
	}
	// The trace was recorded with different arithmetic. On this model the look-ahead predicts about four fifths of a
	// token's experts.
	if overlap := tr.LookAheadOverlap(); agreement < 0.98 || overlap < 0.7 || overlap > 0.9 {
		t.Errorf("agreement %.3f, overlap %.3f", agreement, overlap)
	}
	again, _, err := Record(t.Context(), m, tr, Options{Width: 8, Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(a, again); diff != "" {
		t.Errorf("another number of workers: %s", diff)
	}
}

func TestRecordRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		width  int
		change func(*trace.Trace)
		want   string
	}{
		"width":        {33, func(*trace.Trace) {}, "33 experts of each look-ahead; allowed is 1 to 32"},
		"vocabulary":   {8, func(t *trace.Trace) { t.Model.Vocabulary++ }, "a vocabulary of 4097, the model"},
		"long request": {8, func(t *trace.Trace) { t.Tokens, t.Offsets = make([]int32, 5000), []int64{0, 5000} }, "request 0 of the trace has 5000 tokens"},
		"other model": {8, func(t *trace.Trace) {
			for i, expert := range t.Experts {
				t.Experts[i] = (expert + 9) % 32
			}
		}, "the trace is not of this model: of the activations"},
	} {
		m, tr := recorded(t)
		test.change(tr)
		if _, _, err := Record(t.Context(), m, tr, Options{Width: test.width, Workers: 2}); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	m, tr := recorded(t)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := Record(cancelled, m, tr, Options{Width: 8, Workers: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v; want that of the context", err)
	}
}
