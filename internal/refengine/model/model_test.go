// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

const (
	tinyModel = "../testdata/tiny-qwen3moe"
	// smallModel has untied embeddings and a head dimension of 64: test/models/README.md.
	smallModel = "../../../test/models/small-qwen3moe"
)

func load(directory string) (*Model, error) {
	c, err := checkpoint.Open(directory)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return Load(c, 0)
}

var loadTiny = sync.OnceValues(func() (*Model, error) { return load(tinyModel) })

func tiny(t testing.TB) *Model {
	t.Helper()
	m, err := loadTiny()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

type goldenCase struct {
	Name          string       `json:"name"`
	PromptIDs     []int32      `json:"prompt_ids"`
	Top10         [][2]float64 `json:"last_logits_top10"`
	Experts       [][][]uint16 `json:"experts_by_layer"`
	LastGate      [][]float64  `json:"last_gate_weights_by_layer"`
	GreedyIDs     []int32      `json:"greedy_ids"`
	GreedyMargins []float64    `json:"greedy_margin"`
}

func goldenCases(t testing.TB) []goldenCase { return goldenCasesOf(t, tinyModel) }

func goldenCasesOf(t testing.TB, directory string) []goldenCase {
	t.Helper()
	text, err := os.ReadFile(directory + "/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases []goldenCase `json:"cases"`
	}
	if err := json.Unmarshal(text, &golden); err != nil || len(golden.Cases) != 15 {
		t.Fatalf("%d golden cases, %v", len(golden.Cases), err)
	}
	return golden.Cases
}

// sequence records all outputs of the model for one sequence.
type sequence struct {
	cache  *Cache
	logits []float32
	routes []uint16
}

func newSequence(m *Model, capacity int) *sequence {
	return &sequence{cache: m.NewCache(capacity), logits: make([]float32, m.Vocab)}
}

// chunk prepares the next tokens. take appends the routes to those of the sequence.
func (s *sequence) chunk(m *Model, tokens []int32) Chunk {
	return Chunk{Cache: s.cache, Tokens: tokens, Routes: make([]uint16, len(tokens)*m.Layers*m.TopK), Logits: s.logits}
}

func (s *sequence) step(t testing.TB, r *Runner, tokens []int32) {
	t.Helper()
	chunk := s.chunk(r.model, tokens)
	if err := r.Step([]Chunk{chunk}); err != nil {
		t.Fatal(err)
	}
	s.routes = append(s.routes, chunk.Routes...)
}

func argmax(logits []float32) (best int32) {
	for i, v := range logits {
		if v > logits[best] {
			best = int32(i)
		}
	}
	return best
}

func TestGolden(t *testing.T) { testGolden(t, tiny(t), goldenCases(t)) }

func TestGoldenOfTheSmallModel(t *testing.T) {
	m, err := load(smallModel)
	if err != nil {
		t.Fatal(err)
	}
	testGolden(t, m, goldenCasesOf(t, smallModel))
}

func testGolden(t *testing.T, m *Model, cases []goldenCase) {
	r := m.NewRunner(2)
	worst := 0.0
	for _, g := range cases {
		t.Run(g.Name, func(t *testing.T) {
			s := newSequence(m, len(g.PromptIDs)+len(g.GreedyIDs))
			s.step(t, r, g.PromptIDs)
			for _, top := range g.Top10 {
				difference := math.Abs(float64(s.logits[int(top[0])]) - top[1])
				if worst = max(worst, difference); difference > 2e-3 {
					t.Errorf("logit of token %v is %v, want %v", top[0], s.logits[int(top[0])], top[1])
				}
			}
			for l, tokens := range g.Experts {
				for position, want := range tokens {
					if got := s.routes[(position*m.Layers+l)*m.TopK:][:m.TopK]; !slices.Equal(got, want) {
						t.Errorf("layer %d, position %d: experts %v, want %v", l, position, got, want)
					}
				}
			}
			for i, want := range g.GreedyIDs {
				if g.GreedyMargins[i] < 1e-3 {
					break
				}
				got := argmax(s.logits)
				if got != want {
					t.Fatalf("greedy token %d is %d, want %d (margin %v)", i, got, want, g.GreedyMargins[i])
				}
				s.step(t, r, []int32{got})
			}
		})
	}
	t.Logf("largest difference of a logit: %.2g", worst)
}

// The gate weights of the last position are compared, too, because routes can be equal by chance with wrong weights.
func TestGoldenGateWeights(t *testing.T) {
	m := tiny(t)
	r := m.NewRunner(1)
	for _, g := range goldenCases(t) {
		chunk := newSequence(m, len(g.PromptIDs)).chunk(m, g.PromptIDs)
		if err := r.load([]Chunk{chunk}); err != nil {
			t.Fatal(err)
		}
		for l := range m.layers {
			r.attention(l)
			r.feedForward(l)
			for k, got := range r.moe.weight[(len(r.rows)-1)*m.TopK:] {
				if want := g.LastGate[l][k]; math.Abs(float64(got)-want) > 1e-4 {
					t.Errorf("%s: layer %d, weight %d is %v, want %v", g.Name, l, k, got, want)
				}
			}
		}
	}
}

// Results are bitwise equal for all batches, chunk sizes of a prompt and numbers of workers.
func TestResultsDoNotDependOnBatching(t *testing.T) {
	m := tiny(t)
	rng := rand.New(rand.NewPCG(1, 2))
	var prompts [][]int32
	for range 12 {
		prompt := make([]int32, 1+rng.IntN(150))
		for i := range prompt {
			prompt[i] = rng.Int32N(int32(m.Vocab))
		}
		prompts = append(prompts, prompt)
	}
	want := make([]*sequence, len(prompts))
	alone := m.NewRunner(1)
	for i, prompt := range prompts {
		want[i] = newSequence(m, len(prompt))
		want[i].step(t, alone, prompt)
	}
	for round := range 6 {
		r := m.NewRunner(1 + round%4)
		got := make([]*sequence, len(prompts))
		for i, prompt := range prompts {
			got[i] = newSequence(m, len(prompt)+rng.IntN(5))
		}
		for {
			var chunks []Chunk
			var owners []*sequence
			for _, i := range rng.Perm(len(prompts)) {
				rest := prompts[i][got[i].cache.Len():]
				if len(rest) == 0 || rng.IntN(3) == 0 {
					continue
				}
				chunks = append(chunks, got[i].chunk(m, rest[:1+rng.IntN(len(rest))]))
				owners = append(owners, got[i])
			}
			if err := r.Step(chunks); err != nil {
				t.Fatal(err)
			}
			done := true
			for i, owner := range owners {
				owner.routes = append(owner.routes, chunks[i].Routes...)
			}
			for i, prompt := range prompts {
				done = done && got[i].cache.Len() == len(prompt)
			}
			if done {
				break
			}
		}
		for i := range prompts {
			if !slices.Equal(got[i].logits, want[i].logits) {
				t.Errorf("round %d, prompt %d: logits differ from those of a single prefill", round, i)
			}
			if !slices.Equal(got[i].routes, want[i].routes) {
				t.Errorf("round %d, prompt %d: routes differ from those of a single prefill", round, i)
			}
		}
	}
}

func TestStepRefusesAndLeavesCachesAlone(t *testing.T) {
	m := tiny(t)
	r := m.NewRunner(1)
	good := newSequence(m, 4)
	chunkOf := func(tokens ...int32) Chunk { return newSequence(m, 4).chunk(m, tokens) }
	shortRoutes, shortLogits := chunkOf(1), chunkOf(1)
	shortRoutes.Routes = shortRoutes.Routes[1:]
	shortLogits.Logits = shortLogits.Logits[1:]
	for name, test := range map[string]struct {
		chunk Chunk
		want  string
	}{
		"no tokens":         {chunkOf(), "without tokens"},
		"negative token":    {chunkOf(-1), "token -1 is outside the vocabulary of 4096"},
		"token too large":   {chunkOf(1, 4096), "token 4096 is outside"},
		"beyond capacity":   {chunkOf(1, 2, 3, 4, 5), "sequence of 5 tokens exceeds the capacity 4"},
		"routes too short":  {shortRoutes, "routes have length 15, want 16"},
		"logits too short":  {shortLogits, "logits have length 4095, want a multiple of 4096 for at most 1 tokens"},
		"beyond the tables": {newSequence(m, 3000).chunk(m, make([]int32, 2049)), "context length 2048"},
	} {
		err := r.Step([]Chunk{good.chunk(m, []int32{1}), test.chunk})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
		if good.cache.Len() != 0 || test.chunk.Cache.Len() != 0 {
			t.Errorf("%s: a refused step advanced a cache", name)
		}
	}
}

// Every kernel is bitwise equal to the definition for all shapes, including partial blocks at the edges.
func TestMultiplyMatchesDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	random := func(n int) []float32 {
		s := make([]float32, n)
		for i := range s {
			s[i] = rng.Float32() - 0.5
		}
		return s
	}
	check := func(t *testing.T) {
		for rows := range 10 {
			for _, outputs := range []int{1, 15, 16, 17, 33, 64} {
				for _, depth := range []int{1, 2, 7, 32} {
					xStride, dstStride := depth+rng.IntN(3), outputs+rng.IntN(3)
					x, w := random(rows*xStride), random(outputs*depth)
					dst := make([]float32, rows*dstStride)
					multiply(dst, dstStride, x, xStride, rows, pack(w, outputs, depth), outputs, depth)
					for i := range rows {
						for j := range outputs {
							var sum float32
							for k := range depth {
								sum += float32(x[i*xStride+k] * w[j*depth+k])
							}
							if dst[i*dstStride+j] != sum {
								t.Fatalf("rows %d, outputs %d, depth %d: element %d, %d differs", rows, outputs, depth, i, j)
							}
						}
						for j := outputs; j < dstStride; j++ {
							if dst[i*dstStride+j] != 0 {
								t.Fatalf("rows %d, outputs %d, depth %d: wrote past the outputs", rows, outputs, depth)
							}
						}
					}
				}
			}
		}
	}
	t.Run("chosen kernel", check)
	t.Run("portable kernel", func(t *testing.T) {
		defer func(chosen bool) { useAVX = chosen }(useAVX)
		useAVX = false
		check(t)
	})
}

// BenchmarkDecode measures the tokens per second of concurrent sequences that each extend a context of 128 tokens.
func BenchmarkDecode(b *testing.B) {
	m := tiny(b)
	for _, n := range []int{1, 16} {
		b.Run(fmt.Sprintf("requests=%d", n), func(b *testing.B) {
			r := m.NewRunner(runtime.GOMAXPROCS(0))
			chunks := make([]Chunk, n)
			prompt := goldenCases(b)[0].PromptIDs
			for i := range chunks {
				s := newSequence(m, m.MaxPositions)
				s.step(b, r, slices.Repeat(prompt, 4)[:96+2*i])
				chunks[i] = s.chunk(m, []int32{1})
			}
			for b.Loop() {
				if chunks[0].Cache.length > 400 {
					for i := range chunks {
						chunks[i].Cache.length -= 300
					}
				}
				if err := r.Step(chunks); err != nil {
					b.Fatal(err)
				}
				for i := range chunks {
					chunks[i].Tokens[0] = argmax(chunks[i].Logits)
				}
			}
			b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

// BenchmarkPrefill measures the tokens per second of prompts of 512 tokens.
func BenchmarkPrefill(b *testing.B) {
	m := tiny(b)
	r := m.NewRunner(runtime.GOMAXPROCS(0))
	var prompt []int32
	for _, g := range goldenCases(b) {
		prompt = append(prompt, g.PromptIDs...)
	}
	prompt = slices.Repeat(prompt, 2)[:512]
	s := newSequence(m, 512)
	chunk := s.chunk(m, prompt)
	for b.Loop() {
		s.cache.length = 0
		if err := r.Step([]Chunk{chunk}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(prompt)*b.N)/b.Elapsed().Seconds(), "tokens/s")
}
