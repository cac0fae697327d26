// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"testing"
	"time"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// favourite is a forecast based only on the kind of text, with ties.
type favourite struct{ trace *trace.Trace }

func (f favourite) Score(dst []float32, request int) { f.ScoreFirst(dst, request, 1) }

func (f favourite) ScoreFirst(dst []float32, request, _ int) {
	clear(dst)
	dst[int(f.trace.Domains[request])%len(dst)] = 1
}

// Requests that may wait reach the ranks of their experts more often. At a low arrival rate no request waits, and no
// request waits longer than the maximum.
func TestDelay(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := draw(t, tr, 600)
	const hold = time.Second
	// serve simulates arrivals with the given gap in seconds. It returns how many requests are on the ranks of their
	// kind, and how often requests waited.
	serve := func(hold time.Duration, gap float64) (home, waited int) {
		o, m := testOptions(tr, placement.DataParallel, 4, plain()), vanilla(tr, 4)
		o.Hold, o.Cap, m.Policy, m.Requests = hold, 1.03, dispatch.Price, favourite{tr}
		e, err := newEngine(tr, m, requests, o)
		if err != nil {
			t.Fatal(err)
		}
		if holds := e.holder != nil; holds != (hold > 0) {
			t.Fatalf("hold %v: waiting enabled: %t", hold, holds)
		}
		assigned := func() (n int) {
			for _, l := range e.lanes {
				n += len(l.waiting)
			}
			return n
		}
		all := make([]served, len(requests))
		for i := range requests {
			all[i] = served{Request: &requests[i], arrival: float64(i) * gap * 1e6}
		}
		for next := 0; next < len(all); {
			e.now = all[next].arrival
			next = e.arrive(all, next)
			waited += next - assigned()
		}
		if hold > 0 {
			if ends := e.holder.ends(); ends < e.now {
				t.Errorf("the maximum wait of a request ended %v µs ago", e.now-ends)
			}
			e.holder.release(e.now + float64(hold.Microseconds()))
		}
		if assigned() != len(all) {
			t.Errorf("%d of %d requests are assigned", assigned(), len(all))
		}
		for rank, l := range e.lanes {
			for _, s := range l.waiting {
				if int(tr.Domains[s.Source])%4 == rank {
					home++
				}
			}
		}
		return home, waited
	}
	const busy, quiet = 0.01, 0.3
	atOnce, _ := serve(0, busy)
	homeWaiting, waited := serve(hold, busy)
	if homeWaiting <= atOnce || waited == 0 {
		t.Errorf("%d requests are on their rank with waiting, %d without; requests waited %d times", homeWaiting, atOnce, waited)
	}
	if _, waited := serve(hold, quiet); waited != 0 {
		t.Errorf("requests waited %d times, although the gaps are too long for waiting", waited)
	}
}
