// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

var longTokenizer = flag.String("long-tokenizer", "", "tokenizer.json of the trace of -sampled-trace, to measure the locality of long prompts with it")

// TestLongPromptsKeepTheirLocality joins the requests of a trace to long ones, sends their text, and compares the local
// activation rate with and without a bound on the tokens that are scored. Requests are of one kind of text, or of
// several. It measures the curve in docs/benchmarks/router.md with -sampled-trace and -long-tokenizer.
func TestLongPromptsKeepTheirLocality(t *testing.T) {
	const unbounded = 1 << 20
	p, _ := solved(t)
	layout, length, bounds, runs := p.layout, 4096, []int{unbounded, plans.ScoredTokens}, 2
	recorded, err := trace.Open(t.Context(), planstest.Trace)
	if err != nil {
		t.Fatal(err)
	}
	held := recorded.AllRequests()
	if *longTokenizer != "" {
		length, bounds, runs = 8192, []int{unbounded, 4096, 2048, 1024, 768, 512, 256, 128}, 5
		if recorded, err = trace.Open(t.Context(), *sampledTrace); err != nil {
			t.Fatal(err)
		}
		solution, err := solver.Solve(t.Context(), recorded, solver.Options{
			Ranks: 8, Attention: placement.DataParallel, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, held, err = trace.Split(recorded, 20, 1); err != nil {
			t.Fatal(err)
		}
		tokens, err := tokenizer.Load(*longTokenizer)
		if err != nil {
			t.Fatal(err)
		}
		layout = plans.New(strings.Repeat("d", 64), solution.Plan, tokens)
	}
	text := func(ids []int32) string {
		quoted, err := json.Marshal(layout.Tokenizer.Decode(ids, false))
		if err != nil {
			panic(err) // a string
		}
		return `"text":` + string(quoted)
	}
	mixed := slices.Clone(held)
	rand.New(rand.NewPCG(5, 5)).Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
	for _, kind := range []struct {
		name     string
		requests []int
	}{{"one kind of text", held}, {"several kinds", mixed}} {
		long, bounded := joined(recorded, kind.requests, length, kind.name == "one kind of text")
		var line strings.Builder
		rates := map[int]float64{}
		for _, bound := range bounds {
			limited := *layout
			limited.Scored = bound
			for range runs {
				_, sketch := dispatched(t, &limited, long, bounded, text)
				rates[bound] += sketch.Overall.Value() / float64(runs)
			}
			fmt.Fprintf(&line, " %d: %.4f", bound, rates[bound])
		}
		t.Logf("%s, %d requests of %d tokens, local activation rate by the maximum number of scored tokens:%s", kind.name, len(bounded), length, &line)
		if lost := rates[unbounded] - rates[plans.ScoredTokens]; lost > .01 {
			t.Errorf("%s: a bound of %d tokens costs %.4f", kind.name, plans.ScoredTokens, lost)
		}
	}
}

// joined joins requests of a trace to requests of a length, and returns their bounds. With alike, a request has one kind
// of text, as far as the trace names kinds.
func joined(from *trace.Trace, requests []int, length int, alike bool) (*trace.Trace, [][2]int) {
	long := &trace.Trace{Model: from.Model}
	row := len(from.Model.Layers) * from.Model.TopK
	kinds := map[uint8][]int{}
	for _, i := range requests {
		kind := uint8(0)
		if alike && from.Domains != nil {
			kind = from.Domains[i]
		}
		kinds[kind] = append(kinds[kind], i)
	}
	var bounds [][2]int
	for kind := range 256 {
		begin := len(long.Tokens)
		for _, i := range kinds[uint8(kind)] {
			at, end := int(from.Offsets[i]), int(from.Offsets[i+1])
			for at < end {
				next := min(end, at+length-(len(long.Tokens)-begin))
				long.Tokens = append(long.Tokens, from.Tokens[at:next]...)
				long.Experts = append(long.Experts, from.Experts[at*row:next*row]...)
				if at = next; len(long.Tokens)-begin == length {
					bounds = append(bounds, [2]int{begin, len(long.Tokens)})
					begin = len(long.Tokens)
				}
			}
		}
		long.Tokens, long.Experts = long.Tokens[:begin], long.Experts[:begin*row]
	}
	return long, bounds
}
