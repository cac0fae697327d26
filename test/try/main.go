// SPDX-License-Identifier: Apache-2.0

// Command try shows within a minute what a plan changes, without Kubernetes and without GPUs. It runs the programs in
// bin/ as a user of a bare host would (docs/bare-host.md):
//
//  1. A reference engine serves the small trained model of this repository on four ranks.
//  2. semmoe profile records the experts that one half of a corpus activates, and semmoe solve makes a plan.
//  3. A second reference engine serves the plan. A request router is in front of each engine: one assigns requests
//     round-robin, one by the plan. Both serve the other half of the corpus at the same time.
//  4. semmoe report writes a page about the plan.
//
// The exit code is 0 only if all checks hold: both engines give the same answers, and the plan has the higher local
// activation rate. Ctrl-C ends all programs.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/corpus"
	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/processes"
	"github.com/semmoe/operator/test/progress"
)

const (
	// checkpointDir is the path of the small trained model in the repository: 4 layers of 32 experts, top-4.
	checkpointDir = "internal/refengine/testdata/tiny-qwen3moe"
	ranks         = 4
	// batchTokens is the batch size for modelled times. It is large for the small model: with fewer tokens, latency
	// dominates the time of a layer.
	batchTokens = 1 << 20
)

// options configure a run.
type options struct {
	// out is the directory for plan, trace, report and logs. Its content is replaced.
	out string
	// requests limits the profiled and the served requests. 0 means no limit.
	requests int
}

func main() {
	var o options
	flag.IntVar(&o.requests, "requests", 0, "maximum number of profiled and of served requests (default: the whole corpus)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root, err := localcluster.RepositoryRoot()
	if err == nil {
		o.out = filepath.Join(root, "bin", "try")
		err = run(ctx, o, os.Stdout)
	}
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "\ntry: FAILED: %v\n", err)
		os.Exit(1)
	}
}

// limit returns at most n requests, evenly spaced in the list, so that all kinds remain.
func limit(requests []corpus.Request, n int) []corpus.Request {
	if n == 0 || n >= len(requests) {
		return requests
	}
	chosen := make([]corpus.Request, n)
	for i := range chosen {
		chosen[i] = requests[i*len(requests)/n]
	}
	return chosen
}

func run(ctx context.Context, o options, w io.Writer) error {
	root, err := localcluster.RepositoryRoot()
	if err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(o.out), os.MkdirAll(o.out, 0o755)); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	t := &try{out: o.out, model: filepath.Join(root, checkpointDir), progress: progress.New(w), w: w, cancel: cancel}
	return errors.Join(t.play(ctx, o.requests), t.stop())
}

// play profiles, plans, serves and reports.
func (t *try) play(ctx context.Context, requests int) error {
	train, heldOut, err := corpus.Halves(ctx)
	if err != nil {
		return err
	}
	train, heldOut = limit(train, requests), limit(heldOut, requests)
	// In the order of the corpus, one kind of text follows the other, and its rank would be overloaded.
	rand.New(rand.NewPCG(1, 0)).Shuffle(len(heldOut), func(i, j int) { heldOut[i], heldOut[j] = heldOut[j], heldOut[i] })
	fmt.Fprintf(t.w, "A model of 4 layers with 32 experts on %d ranks: %d requests are profiled, %d others are served.\n\n", ranks, len(train), len(heldOut))
	if err := t.plan(ctx, train); err != nil {
		return err
	}
	arms, err := t.serve(ctx)
	if err != nil {
		return err
	}
	if err := t.compare(ctx, arms, heldOut); err != nil {
		return err
	}
	return t.conclude(ctx, arms, len(heldOut))
}

// try is one run.
type try struct {
	out, model string
	progress   *progress.Progress
	w          io.Writer
	running    []*processes.Process
	cancel     context.CancelCauseFunc
	// unplanned is the address of the engine with the default placement.
	unplanned string
	promise   promise
}

// promise is what semmoe solve predicts.
type promise struct {
	LAR             float64 `json:"lar"`
	BaselineLAR     float64 `json:"baseline_lar"`
	LayerUS         float64 `json:"layer_us"`
	BaselineLayerUS float64 `json:"baseline_layer_us"`
	Reason          string  `json:"reason"`
	Hardware        string  `json:"hardware"`
	Digest          string  `json:"plan_digest"`
}

// file returns the path of a file of the run.
func (t *try) file(name string) string { return filepath.Join(t.out, name) }

// plan starts an engine with the default placement, profiles it and solves a plan.
func (t *try) plan(ctx context.Context, train []corpus.Request) (err error) {
	if err := t.progress.Step(ctx, "engine serves the model", func(func(string)) (err error) {
		t.unplanned, err = t.startEngine(ctx, "engine")
		return err
	}); err != nil {
		return err
	}
	lines, err := corpus.JSONL(train)
	if err != nil {
		return err
	}
	if err := os.WriteFile(t.file("dataset.jsonl"), lines, 0o644); err != nil {
		return err
	}
	if err := t.progress.Step(ctx, "semmoe profile", func(func(string)) error {
		_, err := t.semmoe(ctx, "profile", "--endpoint", "http://"+t.unplanned, "--model-path", t.model, "--dataset", t.file("dataset.jsonl"), "--out", t.file("trace.safetensors.zst"))
		return err
	}); err != nil {
		return err
	}
	return t.progress.Step(ctx, "semmoe solve", func(func(string)) error {
		// The objective and the share of training requests are those of a PlacementPlan.
		text, err := t.semmoe(ctx, "solve", "--trace", t.file("trace.safetensors.zst"), "--ep", fmt.Sprint(ranks), "--attention", "dp", "--objective", "time",
			"--batch-tokens", fmt.Sprint(batchTokens), "--train-percent", "80", "--out", t.file("plan"), "-o", "json")
		if err != nil {
			return err
		}
		return json.Unmarshal(text, &t.promise)
	})
}

// serve starts an engine with the plan, and a router in front of each engine.
func (t *try) serve(ctx context.Context) (arms [2]*arm, err error) {
	solved, _, err := plan.Read(t.file("plan"))
	if err != nil {
		return arms, err
	}
	profiled, err := trace.Open(ctx, t.file("trace.safetensors.zst"))
	if err != nil {
		return arms, err
	}
	layer := cost.LayerOf(&profiled.Model, cost.MachinesOf(solved.Machines(), ranks, ranks), ranks, solved.Placement.SlotsPerRank)
	today := cost.DefaultPlacement(profiled.Model.Layers, profiled.Model.Experts, ranks)
	before, after := newArm("Default, round-robin", today, &profiled.Model, layer), newArm("Plan", solved.Placement, &profiled.Model, layer)
	err = t.progress.Step(ctx, "engine serves the plan", func(func(string)) error {
		planned, err := t.startEngine(ctx, "engine-planned", "--init-expert-location", t.file("plan/engine/sglang.json"))
		if err != nil {
			return err
		}
		// The router tokenizes prompts by the tokenizer in the directory of the plan.
		tokenizer, err := os.ReadFile(filepath.Join(t.model, "tokenizer.json"))
		if err != nil {
			return err
		}
		if err := os.WriteFile(t.file("plan/tokenizer.json"), tokenizer, 0o644); err != nil {
			return err
		}
		if before.address, err = t.startRouter("router", t.unplanned, "--policy", "round-robin", "--ranks", fmt.Sprint(ranks)); err != nil {
			return err
		}
		after.address, err = t.startRouter("router-planned", planned, "--default-plan-dir", t.file("plan"))
		return err
	})
	if err != nil {
		return arms, err
	}
	return [2]*arm{before, after}, t.progress.Step(ctx, "two request routers serve", func(func(string)) error {
		return errors.Join(before.waitServing(ctx, ""), after.waitServing(ctx, t.promise.Digest[:shortDigest]))
	})
}

// shortDigest is the length of a digest in the headers of the request router.
const shortDigest = 16

// compare sends the requests through both routers at the same time, and shows the state of both.
func (t *try) compare(ctx context.Context, arms [2]*arm, requests []corpus.Request) error {
	return t.progress.Step(ctx, "requests served", func(report func(string)) error {
		var mu sync.Mutex
		next := 1 // the number of answers of both routers at the next report
		answered := func() {
			mu.Lock()
			defer mu.Unlock()
			before, after := arms[0].state(), arms[1].state()
			if n := min(before.served, after.served); n >= next {
				report(fmt.Sprintf("%d: round-robin %v | plan %v", n, before, after))
				next = n + 1
				if !t.progress.Terminal {
					next = n + max(1, len(requests)/4)
				}
			}
		}
		group, ctx := errgroup.WithContext(ctx)
		for _, a := range arms {
			group.Go(func() error { return a.serve(ctx, requests, answered) })
		}
		return group.Wait()
	})
}

// conclude writes the page about the plan, and prints the result.
func (t *try) conclude(ctx context.Context, arms [2]*arm, requests int) error {
	if err := t.progress.Step(ctx, "semmoe report", func(func(string)) error {
		_, err := t.semmoe(ctx, "report", "--plan", t.file("plan"), "--trace", t.file("trace.safetensors.zst"), "--batch-tokens", fmt.Sprint(batchTokens), "--out", t.file("report.html"))
		return err
	}); err != nil {
		return err
	}
	before, after := arms[0].state(), arms[1].state()
	fmt.Fprintf(t.w, "\n%-24s %-31s %-8s %-10s %s\n", "", "Local activations, observed", "", "Promised", "MoE layer, modelled (promised)")
	for i, s := range []state{before, after} {
		rate, micros := t.promise.BaselineLAR, t.promise.BaselineLayerUS
		if i == 1 {
			rate, micros = t.promise.LAR, t.promise.LayerUS
		}
		fmt.Fprintf(t.w, "%-24s %s %5.1f%%   %5.1f%%     %.0f µs (%.0f µs)\n", arms[i].name, bar(s.lar), 100*s.lar, 100*rate, s.micros, micros)
	}
	equal := 0
	for i := range requests {
		if slices.Equal(arms[0].outputs[i], arms[1].outputs[i]) {
			equal++
		}
	}
	fmt.Fprintf(t.w, "\nModelled for %s with batches of %d tokens: %s.\n", t.promise.Hardware, batchTokens, t.promise.Reason)
	fmt.Fprintf(t.w, "%d of %d answers are the same, token by token. %.0f s in all.\n", equal, requests, time.Since(t.progress.Start).Seconds())
	fmt.Fprintf(t.w, "Report: file://%s\n", t.file("report.html"))
	switch {
	case equal != requests:
		return fmt.Errorf("%d of %d answers differ", requests-equal, requests)
	case after.lar <= before.lar:
		return errors.New("the plan does not increase the local activation rate")
	}
	return nil
}
