// SPDX-License-Identifier: Apache-2.0

// Command routes writes the inputs of test/gpu/moe_layer.py: real routes of held-out requests, and the rank that each
// method assigns to each of their tokens. It solves plans for each EP size (attention TP): plans of this project by
// modelled time, with the forecasts `table` and `prefill`, and plans of other methods for comparison. It only needs a
// routing trace:
//
//	go run ./test/gpu/routes --trace FILE --out routes.safetensors
//
// test/gpu/README.md describes the file.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// format is the name of the file format.
const format = "semmoe-routes/1"

// options are the flags.
type options struct {
	trace, out         string
	ranks, layers      []int
	prefill, decode    []int
	trainPercent, seed int
	// hiddenSize and expertSize are the sizes of the measured model, for plans by time. A hidden size of 0 selects the
	// size in the trace.
	hiddenSize, expertSize int
}

// compared contains the plans of other methods, by the name of the method. Their tokens are shuffled by the table.
var compared = []struct {
	method    string
	algorithm placement.Algorithm
}{{"activation", placement.Auto}, {"eplb", placement.EPLB}}

func main() {
	o, err := parse(os.Args[1:])
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		defer stop()
		err = o.run(ctx)
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func parse(arguments []string) (*options, error) {
	o := &options{ranks: []int{2, 4}, layers: []int{2, 6, 10}, prefill: []int{4096, 8192, 16384}, decode: []int{64, 128, 256, 512}}
	flags := flag.NewFlagSet("routes", flag.ContinueOnError)
	flags.StringVar(&o.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	flags.StringVar(&o.out, "out", "", "path of the file to write (required)")
	flags.IntVar(&o.trainPercent, "train-percent", 20, "percentage of the requests that plans are solved from, by whole documents")
	flags.IntVar(&o.seed, "seed", 1, "seed of the split, the search and the order of the requests")
	flags.IntVar(&o.hiddenSize, "hidden", 2048, "hidden size of the measured model, for plans by time")
	flags.IntVar(&o.expertSize, "expert-size", 1408, "width of an expert of the measured model, for plans by time")
	lists := map[string]*[]int{"ep": &o.ranks, "layers": &o.layers, "prefill": &o.prefill, "decode": &o.decode}
	for name, usage := range map[string]string{
		"ep": "EP sizes", "layers": "MoE layers to write, counted from 0",
		"prefill": "tokens of batches of consecutive tokens of whole requests", "decode": "tokens of batches of one token per request",
	} {
		flags.Func(name, fmt.Sprintf("%s, separated by commas (default %s)", usage, strings.Trim(fmt.Sprint(*lists[name]), "[]")), func(text string) (err error) {
			*lists[name], err = numbers(text)
			return err
		})
	}
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	if o.trace == "" || o.out == "" || flags.NArg() > 0 {
		return nil, fmt.Errorf("usage: routes --trace FILE --out FILE; --trace is %q, --out %q, further arguments %q", o.trace, o.out, flags.Args())
	}
	return o, nil
}

// numbers parses non-negative integers.
func numbers(text string) ([]int, error) {
	var all []int
	for _, word := range strings.Split(text, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%q is invalid: must be an integer of at least 0", word)
		}
		all = append(all, n)
	}
	return all, nil
}

func (o *options) run(ctx context.Context) error {
	t, err := trace.Open(ctx, o.trace)
	if err != nil {
		return err
	}
	f, err := o.collect(ctx, t)
	if err != nil {
		return err
	}
	return atomicfile.Write(o.out, 0o644, f.write)
}

// collect returns the file for a trace.
func (o *options) collect(ctx context.Context, t *trace.Trace) (*file, error) {
	if err := o.check(t); err != nil {
		return nil, err
	}
	if o.hiddenSize > 0 {
		t.Model.HiddenSize, t.Model.Config = o.hiddenSize, fmt.Sprintf(`{"moe_intermediate_size": %d}`, o.expertSize)
	}
	_, test, err := trace.Split(t, o.trainPercent, uint64(o.seed))
	if err != nil {
		return nil, err
	}
	batches, err := o.batches(t, trace.Shuffled(test, uint64(o.seed)))
	if err != nil {
		return nil, err
	}
	f := &file{metadata: o.metadata(t, batches)}
	f.addBatches(t, batches, o.layers)
	for _, ranks := range o.ranks {
		if err := o.addRanks(ctx, f, t, batches, ranks); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// check validates the options for the trace before any plan is solved.
func (o *options) check(t *trace.Trace) error {
	for _, l := range o.layers {
		if l >= len(t.Model.Layers) {
			return fmt.Errorf("--layers: MoE layer %d is invalid: the trace has 0 to %d", l, len(t.Model.Layers)-1)
		}
	}
	if t.Model.Experts > 256 {
		return fmt.Errorf("the model of the trace has %d experts; the file format supports at most 256", t.Model.Experts)
	}
	for _, ranks := range o.ranks {
		for _, n := range append(append([]int{}, o.prefill...), o.decode...) {
			if ranks < 2 || n < 1 || n%ranks != 0 {
				return fmt.Errorf("a batch of %d tokens cannot be split into equal shards for %d ranks: --ep must be 2 or more, and divide --prefill and --decode", n, ranks)
			}
		}
	}
	return nil
}

// batch is the name of a batch's tensors, and the positions of its tokens in the trace.
type batch struct {
	Name      string `json:"name"`
	Phase     string `json:"phase"`
	Tokens    int    `json:"tokens"`
	positions []int
}

// batches returns the batches. A prefill batch contains the first tokens of consecutive requests, and a decode batch
// the last token of each request.
func (o *options) batches(t *trace.Trace, requests []int) ([]batch, error) {
	var whole, last []int
	for _, r := range requests {
		for at := t.Offsets[r]; at < t.Offsets[r+1]; at++ {
			whole = append(whole, int(at))
		}
		last = append(last, int(t.Offsets[r+1])-1)
	}
	var all []batch
	for _, phase := range []struct {
		name      string
		sizes     []int
		positions []int
	}{{"prefill", o.prefill, whole}, {"decode", o.decode, last}} {
		for _, n := range phase.sizes {
			if n > len(phase.positions) {
				return nil, fmt.Errorf("--%s has a batch of %d tokens; the held-out requests of the trace have %d", phase.name, n, len(phase.positions))
			}
			all = append(all, batch{fmt.Sprintf("%s.%d", phase.name, n), phase.name, n, phase.positions[:n]})
		}
	}
	return all, nil
}

func (o *options) metadata(t *trace.Trace, batches []batch) map[string]string {
	encode := func(value any) string {
		text, err := json.Marshal(value)
		if err != nil {
			panic(err) // numbers and strings can always be encoded
		}
		return string(text)
	}
	return map[string]string{
		"format": format, "trace": fmt.Sprintf("%x", t.Digest), "num_experts": strconv.Itoa(t.Model.Experts), "top_k": strconv.Itoa(t.Model.TopK),
		"vocab_size": strconv.Itoa(t.Model.Vocabulary), "ep_sizes": encode(o.ranks), "layers": encode(o.layers), "batches": encode(batches),
		"train_percent": strconv.Itoa(o.trainPercent), "seed": strconv.Itoa(o.seed),
	}
}

// addRanks adds the plans for one EP size, and the ranks that each method assigns to the tokens of each batch.
func (o *options) addRanks(ctx context.Context, f *file, t *trace.Trace, batches []batch, ranks int) error {
	options := solver.Options{
		Ranks: ranks, Attention: placement.TensorParallel, Algorithm: placement.Auto, Objective: placement.Time, Forecast: solver.Prefill,
		TrainPercent: o.trainPercent, Seed: uint64(o.seed), BatchTokens: o.prefill,
	}
	solved, err := solver.Solve(ctx, t, options)
	if err != nil {
		return err
	}
	f.addPlan(solved.Plan, o.layers)
	for _, b := range batches {
		for _, by := range []solver.Forecast{solver.Table, solver.Prefill} {
			dealt, err := lab.AssignBatch(ctx, t, solved.Plan, by, b.positions)
			if err != nil {
				return err
			}
			f.addDealt(ranks, b, string(by), dealt, o.layers)
		}
		dealt, err := lab.AssignBatchByRoutes(ctx, t, solved.Plan.Placement, b.positions)
		if err != nil {
			return err
		}
		f.addDealt(ranks, b, "oracle", dealt, o.layers)
	}
	for _, by := range compared {
		options.Algorithm, options.Objective, options.Forecast = by.algorithm, placement.Activation, solver.Table
		if solved, err = solver.Solve(ctx, t, options); err != nil {
			return err
		}
		f.addSlots(solved.Plan, o.layers, "."+by.method)
		for _, b := range batches {
			dealt, err := lab.AssignBatch(ctx, t, solved.Plan, solver.Table, b.positions)
			if err != nil {
				return err
			}
			f.addDealt(ranks, b, by.method, dealt, o.layers)
		}
	}
	return nil
}
