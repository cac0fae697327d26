// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"math"
	"slices"
	"testing"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestOldRequestsKeepTheirWeight reduces the room for the counts of requests: the total weight of old requests is
// preserved, and no old request weighs much more than a recent one.
func TestOldRequestsKeepTheirWeight(t *testing.T) {
	shape := tracetest.Small
	shape.DocumentsPerDomain = 60
	all := tracetest.Generate(shape, 1)
	half := all.Requests() / 2
	old, recent := all.Subset(all.AllRequests()[:half]), all.Subset(all.AllRequests()[half:])
	o := options(placement.DataParallel, 4)
	o.TrainPercent = 80
	solved, err := Solve(t.Context(), old, o)
	if err != nil {
		t.Fatal(err)
	}
	for _, percent := range []int{5, 25, 100} {
		for _, room := range []int{1000, 200, 100, 40, 10} {
			r, err := newReplan(recent, old, solved.Plan, ReplanOptions{Options: o, PriorPercent: percent, ReplanPolicy: ReplanPolicy{BatchTokens: []int{4096}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := r.search.count(t.Context()); err != nil {
				t.Fatal(err)
			}
			tokens, prior := r.tokens[0].Tokens(), float64(old.TokenCount(old.AllRequests()))
			if err := r.addOldRequests(t.Context(), old.AllRequests(), affinity.Fade(tokens, prior, float64(percent)), room); err != nil {
				t.Fatal(err)
			}
			kept := slices.IndexFunc(r.requests.Weight, func(w float32) bool { return w != 1 })
			if kept < 1 {
				t.Fatalf("%d percent, room for %d: weights %v", percent, room, r.requests.Weight)
			}
			part := func(of []float32) (sum float64) {
				for _, n := range of {
					sum += float64(n)
				}
				return sum
			}
			want := min(float64(percent)/100, prior/tokens)
			if share := part(r.requests.Tokens[kept:]) / part(r.requests.Tokens[:kept]); math.Abs(share-want) > 1e-3 {
				t.Errorf("%d percent, room for %d: old requests weigh %.4f of the recent ones; wanted is %.4f", percent, room, share, want)
			}
			if most := slices.Max(r.requests.Weight); len(r.requests.Rows) > room || most > 3 {
				t.Errorf("%d percent: %d requests where there is room for %d; one counts %v", percent, len(r.requests.Rows), room, most)
			}
		}
	}
}
