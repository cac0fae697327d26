// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/test/corpus"
)

const (
	// trainedTokenizer is a trained tokenizer with a vocabulary of 32,768.
	trainedTokenizer = "internal/model/tokenizer/testdata/big.tokenizer.json.zst"
	sideRanks        = 8
	sidePods         = 4
	sideRounds       = 5
	// reference and plain are the names of the programs that ratios refer to.
	reference = "sglang-router cache_aware"
	plain     = "Go ReverseProxy"
)

// sideLengths are the lengths of prompts in tokens, with the number of requests of a round and the rate of requests in
// the measurement of latency.
var sideLengths = []struct{ tokens, requests, rate int }{{100, 1000, 200}, {1000, 800, 200}, {8000, 300, 100}}

// sideBySide compares the request router with other programs that forward requests, in the same run: all of them run,
// and get the same requests one after another, in rounds.
type sideBySide struct {
	// Missing lists the programs that are not installed.
	Missing  []string         `json:"missing,omitempty"`
	ByTokens []lengthOfPrompt `json:"by_prompt_tokens"`
	Programs []programResult  `json:"programs"`
}

type lengthOfPrompt struct {
	Tokens   int            `json:"tokens"`
	Programs []programCosts `json:"programs"`
}

// programCosts are the costs of a program with prompts of one length. The ratios are medians over rounds.
type programCosts struct {
	Name string `json:"name"`
	// CPU is the processor time per request, four concurrently.
	CPU         float64 `json:"cpu_us_per_request"`
	ToReference float64 `json:"cpu_to_sglang_router,omitempty"`
	ToPlain     float64 `json:"cpu_to_reverse_proxy"`
	// Added is the median latency in addition to that of direct requests, at a fixed rate.
	Added float64 `json:"added_p50_ms"`
	// Rate is the number of requests per second with 64 concurrent requests.
	Rate float64 `json:"requests_per_second"`
	// Failed is the number of requests that failed, of all rounds.
	Failed int `json:"failed"`
}

type programResult struct {
	Name string `json:"name"`
	// FirstEvent is the median time to the first event of a stream in addition to that of direct requests.
	FirstEvent float64 `json:"added_first_event_ms"`
	// Resident is the memory after all requests.
	Resident float64 `json:"resident_mib"`
}

// named is a running program.
type named struct {
	name string
	*process
}

// benchSideBySide measures prompts of the lengths in only, or of all sideLengths.
func benchSideBySide(ctx context.Context, only []string) (*sideBySide, error) {
	texts, file, err := realText()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "bench-peers-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	engine, err := startProcess(ctx, engineProcess)
	if err != nil {
		return nil, err
	}
	defer engine.stop() //nolint:errcheck // its measurements are complete
	_, port, err := net.SplitHostPort(engine.address)
	if err != nil {
		return nil, err
	}
	var engines []string
	for pod := range sidePods {
		engines = append(engines, net.JoinHostPort(podAddress(pod), port))
	}
	r := &sideBySide{}
	programs, err := r.startAll(ctx, dir, engines, texts, file)
	defer func() {
		for _, p := range programs {
			p.stop() //nolint:errcheck // its measurements are complete
		}
	}()
	if err != nil {
		return nil, err
	}
	return r, r.measure(ctx, texts, engine, programs, only)
}

// startAll starts the request router with and without a plan, the reverse proxy, and the peers that are installed.
func (r *sideBySide) startAll(ctx context.Context, dir string, engines []string, texts *realTexts, tokenizer []byte) (programs []named, err error) {
	artifact, err := plan.Encode(routerPlan(sideRanks))
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(engines[0])
	if err != nil {
		return nil, err
	}
	for _, mode := range []struct {
		name, dir string
		plan      bool
		policy    dispatch.Policy
	}{{"request router, with a plan", "planned", true, dispatch.Price}, {"request router, round-robin", "unplanned", false, dispatch.RoundRobin}} {
		snapshot := filepath.Join(dir, mode.dir)
		digest := ""
		if mode.plan {
			digest = artifact.Digest
		}
		if err := writeSnapshot(snapshot, artifact, tokenizer, port, sidePods, sideRanks, digest); err != nil {
			return programs, err
		}
		started, err := startProcess(ctx, routerProcess, snapshot, string(mode.policy))
		if err != nil {
			return programs, err
		}
		if mode.plan {
			started.plan = artifact.Digest[:16]
		}
		programs = append(programs, named{mode.name, started})
	}
	forwarder, err := startProcess(ctx, plainProcess, engines[0])
	if err != nil {
		return programs, err
	}
	programs = append(programs, named{plain, forwarder})
	free, err := freePorts(1)
	if err != nil {
		return programs, err
	}
	for i := range peers {
		started, err := peers[i].start(ctx, dir, free[0]+2*i, engines, texts.body(0, 0, 10, false))
		if err != nil {
			return programs, err
		}
		if started == nil {
			r.Missing = append(r.Missing, peers[i].name)
			continue
		}
		programs = append(programs, named{peers[i].name, started})
	}
	return programs, nil
}

func (r *sideBySide) measure(ctx context.Context, texts *realTexts, engine *process, programs []named, only []string) error {
	client := newLoadClient()
	seed := uint64(0)
	for _, length := range sideLengths {
		if len(only) > 0 && !slices.Contains(only, strconv.Itoa(length.tokens)) {
			continue
		}
		all := lengthOfPrompt{Tokens: length.tokens}
		used, rates, added, failed := map[string][]float64{}, map[string][]float64{}, map[string][]float64{}, map[string]int{}
		for range sideRounds + 1 { // the first round warms up
			seed++
			bodies := texts.bodies(seed, length.requests, length.tokens, false)
			direct, err := client.openLoop(ctx, engine, bodies[:length.rate], length.rate)
			if err != nil {
				return err
			}
			for _, p := range programs {
				before, err := treeUsage(p.command.Process.Pid)
				if err != nil {
					return err
				}
				few, err := client.tolerant(ctx, p.process, bodies, 4)
				if err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
				after, err := treeUsage(p.command.Process.Pid)
				if err != nil {
					return err
				}
				begin := time.Now()
				many, err := client.tolerant(ctx, p.process, bodies, 64)
				if err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
				elapsed := time.Since(begin).Seconds()
				latencies, err := client.openLoop(ctx, p.process, bodies[:length.rate], length.rate)
				if err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
				failed[p.name] += few + many
				used[p.name] = append(used[p.name], 1e6*(after.CPUSeconds-before.CPUSeconds)/float64(len(bodies)))
				rates[p.name] = append(rates[p.name], float64(len(bodies))/elapsed)
				added[p.name] = append(added[p.name], 1e3*(quantile(latencies, 0.5)-quantile(direct, 0.5)))
			}
		}
		for _, p := range programs {
			all.Programs = append(all.Programs, programCosts{
				Name: p.name, CPU: quantile(used[p.name][1:], 0.5), ToReference: medianRatio(used[p.name], used[reference]), ToPlain: medianRatio(used[p.name], used[plain]),
				Added: quantile(added[p.name][1:], 0.5), Rate: quantile(rates[p.name][1:], 0.5), Failed: failed[p.name],
			})
			fmt.Fprintf(os.Stderr, "bench: %+v\n", all.Programs[len(all.Programs)-1])
		}
		r.ByTokens = append(r.ByTokens, all)
	}
	direct, err := client.firstEvents(ctx, engine, texts.bodies(1000, 50, 1000, true))
	if err != nil {
		return err
	}
	for _, p := range programs {
		events, err := client.firstEvents(ctx, p.process, texts.bodies(1001, 50, 1000, true))
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		memory, err := treeUsage(p.command.Process.Pid)
		if err != nil {
			return err
		}
		r.Programs = append(r.Programs, programResult{p.name, 1e3 * (quantile(events, 0.5) - quantile(direct, 0.5)), memory.ResidentMiB})
	}
	return nil
}

// medianRatio returns the median of the ratios of the rounds after the first one; 0 if the other was not measured.
func medianRatio(values, others []float64) float64 {
	if len(others) == 0 {
		return 0
	}
	ratios := make([]float64, len(values)-1)
	for i := range ratios {
		ratios[i] = values[i+1] / others[i+1]
	}
	return quantile(ratios, 0.5)
}

// realTexts is text of the corpus, of which prompts are cut.
type realTexts struct {
	text          string
	bytesPerToken float64
}

// realText returns text in English and program code, and a trained tokenizer.json.
func realText() (*realTexts, []byte, error) {
	packed, err := os.ReadFile(trainedTokenizer)
	if err != nil {
		return nil, nil, err
	}
	unpacker, err := zstd.NewReader(nil)
	if err != nil {
		return nil, nil, err
	}
	defer unpacker.Close()
	file, err := unpacker.DecodeAll(packed, nil)
	if err != nil {
		return nil, nil, err
	}
	tokens, err := tokenizer.Parse(file)
	if err != nil {
		return nil, nil, err
	}
	var text strings.Builder
	for _, document := range corpus.Written() {
		switch document.Kind {
		case "english", "python", "c", "rust", "javascript", "sql":
			text.WriteString(document.Text)
		}
	}
	return &realTexts{text.String(), float64(text.Len()) / float64(len(tokens.Encode(text.String())))}, file, nil
}

// body returns a request with a prompt from a position of the text on.
func (t *realTexts) body(id, at, tokens int, stream bool) []byte {
	size := int(float64(tokens) * t.bytesPerToken)
	at += strings.IndexByte(t.text[at:], ' ') + 1
	text := t.text[at:]
	for len(text) < size {
		text += t.text
	}
	prompt, err := json.Marshal(strings.ToValidUTF8(fmt.Sprint(id, " ", text[:size]), ""))
	if err != nil {
		panic(err) // a string
	}
	return fmt.Appendf(nil, `{"model":"bench","prompt":%s,"max_tokens":16,"temperature":0,"stream":%t}`, prompt, stream)
}

// bodies returns requests with different prompts.
func (t *realTexts) bodies(seed uint64, n, tokens int, stream bool) [][]byte {
	random := rand.New(rand.NewPCG(seed, uint64(tokens)))
	all := make([][]byte, n)
	for i := range all {
		all[i] = t.body(random.IntN(1<<20), random.IntN(len(t.text)/2), tokens, stream)
	}
	return all
}
