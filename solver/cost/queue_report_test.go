// SPDX-License-Identifier: Apache-2.0

package cost_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// With the policy late, requests are dispatched in a different order than they arrive, each once. The report contains
// the waiting times.
func TestLateCountsEachRequestOnce(t *testing.T) {
	shape := tracetest.Small
	shape.DocumentsPerDomain, shape.TokensPerRequest = 60, 50
	tr := tracetest.Generate(shape, 5)
	p := randomPlacement(tr, 4, rand.New(rand.NewPCG(6, 6)))
	o := options(tr)
	o.WithoutBounds = true
	forecast := forcedRequests{forced{request: func(r int) int { return int(tr.Domains[r]) % 4 }}}
	price, err := cost.DataParallel(t.Context(), tr, p, forecast, o)
	if err != nil || price.Queue != nil {
		t.Fatalf("price: line %+v, %v", price.Queue, err)
	}
	o.Policy, o.MaxWaiting = dispatch.Late, 1
	atOnce, err := cost.DataParallel(t.Context(), tr, p, forecast, o)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&cost.QueueReport{AtOnce: 1}, atOnce.Queue); diff != "" {
		t.Errorf("a line of one: %s", diff)
	}
	if atOnce.Queue = nil; !cmp.Equal(price, atOnce) {
		t.Errorf("a line of one: %s", cmp.Diff(price, atOnce))
	}
	o.MaxWaiting = 0
	late, err := cost.DataParallel(t.Context(), tr, p, forecast, o)
	if err != nil {
		t.Fatal(err)
	}
	// The same experts compute all activations, regardless of the order.
	if math.Abs(late.ExpertImbalance-price.ExpertImbalance) > 1e-12 {
		t.Errorf("expert imbalance %v, with price %v", late.ExpertImbalance, price.ExpertImbalance)
	}
	if late.BaselineLAR != price.BaselineLAR {
		t.Errorf("baseline %v, with price %v", late.BaselineLAR, price.BaselineLAR)
	}
	if l := late.Queue; l == nil || l.AtOnce <= 0 || l.AtOnce >= 1 || l.Mean <= 0 || l.Max < l.Percentile95 || l.Max > dispatch.OvertakeFactor*4 {
		t.Errorf("line %+v", l)
	}
	o.MaxWaiting = -1
	if _, err := cost.DataParallel(t.Context(), tr, p, forecast, o); err == nil || !strings.Contains(err.Error(), "held is -1") {
		t.Errorf("held -1: error %v", err)
	}
}
