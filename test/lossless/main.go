// SPDX-License-Identifier: Apache-2.0

// Command lossless measures the lossless probe on a running engine: the rate of refused correct permutations, and the
// rate of detected faults. The engine reloads its weights in place, so that a hundred checkpoints need one start.
//
//	go run ./test/lossless --engine VLLM --address http://127.0.0.1:8000 --model-path DIR --model-name tiny --ranks 2
//
// vLLM needs VLLM_SERVER_DEV_MODE=1 for its routes collective_rpc and reset_prefix_cache (vllm/entrypoints/serve/dev,
// 0.32.0), and the extension in plugin/; measure.sh sets both. SGLang has update_weights_from_disk
// (python/sglang/srt/entrypoints/http_server.py, 0.5.17). The engine must read the directories that the command writes
// to --work. The command fails if an engine answers differently after it has reloaded its own checkpoint.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/probe"
)

type options struct {
	engine, address, modelPath, modelName, work, raw, replay string
	ranks, permutations, faults                              int
	seed                                                     uint64
}

func main() {
	var o options
	flag.StringVar(&o.engine, "engine", "VLLM", "VLLM or SGLang")
	flag.StringVar(&o.address, "address", "http://127.0.0.1:8000", "base URL of the engine")
	flag.StringVar(&o.modelPath, "model-path", "", "directory of the checkpoint that the engine serves")
	flag.StringVar(&o.modelName, "model-name", "tiny", "name by which the engine serves the model")
	flag.StringVar(&o.work, "work", "", "directory for permuted checkpoints, which the engine reads too (default: a temporary one)")
	flag.StringVar(&o.raw, "raw", "", "file for the answers of every run, as JSON lines")
	flag.StringVar(&o.replay, "replay", "", "file that --raw has written: judge these answers again, without an engine")
	flag.IntVar(&o.ranks, "ranks", 2, "ranks that requests can be pinned to")
	flag.IntVar(&o.permutations, "permutations", 40, "random permutations without a fault")
	flag.IntVar(&o.faults, "faults", 20, "random permutations with each fault")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the permutations")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var report *report
	var err error
	if o.replay != "" {
		report, err = replay(o.replay)
	} else {
		report, err = measure(ctx, o)
	}
	if err == nil {
		err = write(os.Stdout, report)
	}
	if err == nil && !report.passed() {
		err = errors.New("the probe refused a right permutation or did not find a fault")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lossless:", err)
		os.Exit(1)
	}
}

// report is the result of a measurement.
type report struct {
	Engine  string `json:"engine"`
	Model   string `json:"model"`
	Ranks   int    `json:"ranks"`
	Prompts int    `json:"prompts"`
	// RecordSeconds is the time of recording the answers, CheckSeconds the mean time of a check.
	RecordSeconds float64 `json:"record_seconds"`
	CheckSeconds  float64 `json:"check_seconds"`
	// Same is the mean difference after loading the same weights again.
	Same float64 `json:"same"`
	// Right contains the runs without a fault, Faults the runs of each fault.
	Right  group            `json:"right"`
	Faults map[string]group `json:"faults"`
}

// group summarizes the runs of one kind. Means are mean differences in nats, over all ranks.
type group struct {
	Runs      int     `json:"runs"`
	Refused   int     `json:"refused"`
	Positions int     `json:"positions"`
	Allowed   float64 `json:"allowed"`
	LowMean   float64 `json:"lowest_mean"`
	Mean      float64 `json:"mean"`
	HighMean  float64 `json:"highest_mean"`
}

// add evaluates the answers of a run.
func (g *group) add(name string, seed uint64, responses []probe.Response) {
	verdict, d := probe.Judge(responses), distance(responses)
	fmt.Fprintf(os.Stderr, "%s, seed %d: mean difference %.4f over %d, refused: %v\n", name, seed, d.Mean(), d.Positions, verdict)
	if g.Runs == 0 || d.Mean() < g.LowMean {
		g.LowMean = d.Mean()
	}
	g.HighMean = max(g.HighMean, d.Mean())
	g.Mean += (d.Mean() - g.Mean) / float64(g.Runs+1)
	g.Runs++
	if verdict != nil {
		g.Refused++
	}
	g.Positions, g.Allowed = d.Positions, d.Allowed()
}

func (r *report) passed() bool {
	if r.Right.Refused > 0 {
		return false
	}
	for _, g := range r.Faults {
		if g.Refused < g.Runs {
			return false
		}
	}
	return true
}

// bench is the state of a measurement.
type bench struct {
	options
	model    checkpoint.Report
	client   *probe.Client
	header   string
	answers  *probe.Answers
	raw      *json.Encoder
	checking time.Duration
	checks   int
}

func measure(ctx context.Context, o options) (*report, error) {
	adapter, err := registry.For(o.engine)
	if err != nil {
		return nil, err
	}
	if reloads[adapter.Type] == nil {
		return nil, fmt.Errorf("--engine: %s is invalid: only VLLM and SGLang reload weights in place", o.engine)
	}
	o.engine = adapter.Type
	if o.modelPath, err = filepath.Abs(o.modelPath); err != nil {
		return nil, err
	}
	inspected, err := checkpoint.Inspect(o.modelPath)
	if err != nil {
		return nil, err
	}
	if o.work == "" {
		if o.work, err = os.MkdirTemp("", "lossless-*"); err != nil {
			return nil, err
		}
		defer os.RemoveAll(o.work)
	}
	b := &bench{options: o, model: inspected, header: adapter.RankHeader, client: &probe.Client{Address: o.address, Model: o.modelName}}
	b.raw = json.NewEncoder(io.Discard)
	if o.raw != "" {
		file, err := os.Create(o.raw)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		b.raw = json.NewEncoder(file)
	}
	return b.run(ctx)
}

func (b *bench) run(ctx context.Context) (*report, error) {
	r := &report{Engine: b.engine, Model: b.model.ModelDigest, Ranks: b.ranks, Faults: map[string]group{}}
	start := time.Now()
	var err error
	if b.answers, err = probe.Record(ctx, b.client, b.model.ModelDigest); err != nil {
		return nil, err
	}
	r.RecordSeconds, r.Prompts = time.Since(start).Seconds(), len(b.answers.Prompts)
	if err := b.reload(ctx, b.modelPath); err != nil {
		return nil, err
	}
	if _, r.Same, err = b.ask(ctx, same, 0); err != nil {
		return nil, err
	}
	if r.Same > maxSame {
		return nil, fmt.Errorf("the engine answers differently by %.4f nats after it has loaded the same weights again", r.Same)
	}
	seed := b.seed
	for _, f := range faults {
		var g group
		for range b.faults {
			if err := b.try(ctx, f.name, seed, f.plant, &g); err != nil {
				return nil, err
			}
			seed++
		}
		r.Faults[f.name] = g
	}
	for range b.permutations {
		if err := b.try(ctx, right, seed, nil, &r.Right); err != nil {
			return nil, err
		}
		seed++
	}
	r.CheckSeconds = b.checking.Seconds() / float64(max(b.checks, 1))
	return r, b.reload(ctx, b.modelPath)
}

// try loads and checks a random permutation, with a fault if plant is not nil.
func (b *bench) try(ctx context.Context, name string, seed uint64, plant fault, g *group) error {
	random := rand.New(rand.NewPCG(seed, 31))
	permutation := &reshuffle.Permutation{}
	for _, layer := range b.model.MoELayers {
		permutation.Layers = append(permutation.Layers, reshuffle.LayerPermutation{Layer: layer, NewToOld: random.Perm(b.model.Experts)})
	}
	out := filepath.Join(b.work, fmt.Sprintf("permuted-%d", seed))
	defer os.RemoveAll(out)
	if _, err := reshuffle.Run(ctx, reshuffle.Options{Model: b.modelPath, Permutation: permutation, Out: out}); err != nil {
		return err
	}
	if plant != nil {
		if err := plant(out, permutation, random); err != nil {
			return err
		}
	}
	if err := b.reload(ctx, out); err != nil {
		return err
	}
	responses, _, err := b.ask(ctx, name, seed)
	if err != nil {
		return err
	}
	g.add(name, seed, responses)
	return nil
}

// run is a run in the file of --raw.
type run struct {
	Kind      string           `json:"kind"`
	Seed      uint64           `json:"seed"`
	Responses []probe.Response `json:"responses"`
}

// replay evaluates recorded answers.
func replay(path string) (*report, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	r := &report{Faults: map[string]group{}}
	for decoder := json.NewDecoder(file); ; {
		var recorded run
		switch err := decoder.Decode(&recorded); {
		case errors.Is(err, io.EOF):
			return r, nil
		case err != nil:
			return nil, fmt.Errorf("%s: %w", path, err)
		case recorded.Kind == same:
			r.Same = distance(recorded.Responses).Mean()
		case recorded.Kind == right:
			r.Right.add(right, recorded.Seed, recorded.Responses)
		default:
			g := r.Faults[recorded.Kind]
			g.add(recorded.Kind, recorded.Seed, recorded.Responses)
			r.Faults[recorded.Kind] = g
		}
	}
}

// ask sends all prompts, and returns the responses and the mean difference.
func (b *bench) ask(ctx context.Context, name string, seed uint64) ([]probe.Response, float64, error) {
	start := time.Now()
	responses, err := probe.Ask(ctx, b.client, b.answers, b.ranks, b.header)
	if err != nil {
		return nil, 0, err
	}
	b.checking += time.Since(start)
	b.checks++
	return responses, distance(responses).Mean(), b.raw.Encode(run{name, seed, responses})
}

func distance(responses []probe.Response) (all probe.Distance) {
	for _, response := range responses {
		all = all.Plus(probe.Compare(response.Want, response.Got))
	}
	return all
}

// The kinds of runs without a fault: same reloads the weights of the recorded answers, right loads a random
// permutation.
const same, right = "same", "right"

// maxSame is the maximum mean difference in nats after the same weights are reloaded. Answers differ because batches
// with other prompts change the order of sums.
const maxSame = 0.01

// reloads contains the requests that load other weights, by engine. They also drop cached prefixes, which are of the
// previous weights.
var reloads = map[string]func(b *bench, ctx context.Context, dir string) error{
	"VLLM": func(b *bench, ctx context.Context, dir string) error {
		if err := b.post(ctx, "/collective_rpc", map[string]any{"method": "load_experts", "args": []string{dir}}); err != nil {
			return err
		}
		return b.post(ctx, "/reset_prefix_cache", nil)
	},
	"SGLang": func(b *bench, ctx context.Context, dir string) error {
		return b.post(ctx, "/update_weights_from_disk", map[string]any{"model_path": dir, "flush_cache": true})
	},
}

func (b *bench) reload(ctx context.Context, dir string) error {
	if err := reloads[b.engine](b, ctx, dir); err != nil {
		return fmt.Errorf("failed to load the weights of %s: %w", dir, err)
	}
	return nil
}

func (b *bench) post(ctx context.Context, path string, body any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, b.address+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s: %.300s", path, response.Status, answer)
	}
	return nil
}

func write(w io.Writer, r *report) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}
