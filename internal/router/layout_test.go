package router

import (
	"context"
	"math"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/tokenizer"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

const (
	tinyTrace      = "../../solver/testdata/tiny-32e-top4.safetensors.zst"
	tinyCheckpoint = "../refengine/testdata/tiny-qwen3moe"
)

// tinyShape is that of the small checkpoint.
var tinyShape = lar.Shape{Layers: 4, MoELayers: []int{0, 1, 2, 3}, Experts: 32, ExpertsPerToken: 4}

// planned is a plan for the small model on four ranks.
type planned struct {
	plan     *solver.Plan
	artifact *plan.Artifact
	layout   *Layout
}

// short is the digest as headers have it.
func (p planned) short() string { return p.artifact.Digest[:shortDigest] }

// solvedPlans are two plans solved from the small model's routing trace, with different placements.
var solvedPlans = sync.OnceValues(func() ([]planned, error) {
	recorded, err := trace.Open(context.Background(), tinyTrace)
	if err != nil {
		return nil, err
	}
	tokens, err := tokenizer.Load(filepath.Join(tinyCheckpoint, "tokenizer.json"))
	if err != nil {
		return nil, err
	}
	var all []planned
	for _, algorithm := range []placement.Algorithm{placement.Auto, placement.RoundRobinAlgorithm} {
		solution, err := solver.Solve(context.Background(), recorded, solver.Options{
			Ranks: 4, Attention: placement.DataParallel, Algorithm: algorithm, Forecast: solver.Table, TrainPercent: 80, Seed: 1,
		})
		if err != nil {
			return nil, err
		}
		encoded, err := plan.Encode(solution.Plan)
		if err != nil {
			return nil, err
		}
		all = append(all, planned{solution.Plan, encoded, newLayout(encoded.Digest, solution.Plan, tokens)})
	}
	return all, nil
})

func plans(t testing.TB) (first, second planned) {
	t.Helper()
	all, err := solvedPlans()
	if err != nil {
		t.Fatal(err)
	}
	return all[0], all[1]
}

// A layout knows what its placement's slots say, and refuses what does not fit it.
func TestLayoutLocality(t *testing.T) {
	p, _ := plans(t)
	for rank := range 4 {
		local, err := p.layout.locality(tinyShape, 4, rank)
		if err != nil {
			t.Fatal(err)
		}
		for _, layer := range p.plan.Placement.Layers {
			for slot, expert := range layer.Slots {
				if want := slot/p.plan.Placement.SlotsPerRank == rank; local.Local(layer.Layer, expert) != want {
					t.Fatalf("layer %d, expert %d on rank %d: local is %v", layer.Layer, expert, rank, !want)
				}
			}
		}
	}
	wrong := func(change func(*lar.Shape)) lar.Shape {
		shape := tinyShape
		change(&shape)
		return shape
	}
	for name, tc := range map[string]struct {
		shape       lar.Shape
		ranks, rank int
	}{
		"other ranks":   {tinyShape, 8, 0},
		"no such rank":  {tinyShape, 4, 4},
		"other layers":  {wrong(func(s *lar.Shape) { s.Layers = 5 }), 4, 0},
		"other experts": {wrong(func(s *lar.Shape) { s.Experts = 64 }), 4, 0},
	} {
		if _, err := p.layout.locality(tc.shape, tc.ranks, tc.rank); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// A text is scored as its token ids are, and as the table scores those.
func TestLayoutScore(t *testing.T) {
	p, _ := plans(t)
	const text = "SELECT name FROM users WHERE id = 1"
	ids := p.layout.tokenizer.Encode(text)
	want := make([]float32, 4)
	p.plan.Ranks.ScoreTokens(want, ids)

	withoutTable, withoutTokenizer := *p.layout, *p.layout
	withoutTable.table, withoutTokenizer.tokenizer = nil, nil
	cases := map[string]struct {
		layout   *Layout
		prompt   prompt
		scores   []float32
		tokens   int
		unscored string
	}{
		"text":                      {p.layout, prompt{texts: []string{text}}, want, len(ids), ""},
		"ids":                       {p.layout, prompt{ids: ids}, want, len(ids), ""},
		"more than is scored":       {p.layout, prompt{ids: ids, more: 7}, want, len(ids), ""},
		"nothing":                   {p.layout, prompt{}, nil, 0, unscoredNoPrompt},
		"no table":                  {&withoutTable, prompt{ids: ids}, nil, 0, unscoredNoTable},
		"text without a tokenizer":  {&withoutTokenizer, prompt{texts: []string{text}}, nil, 0, unscoredNoTokenizer},
		"ids without a tokenizer":   {&withoutTokenizer, prompt{ids: ids}, want, len(ids), ""},
		"ids outside of vocabulary": {p.layout, prompt{ids: []int32{1 << 30}}, make([]float32, 4), 1, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			scores, _, ids, unscored := tc.layout.score(tc.prompt)
			tokens := len(ids)
			if diff := cmp.Diff(tc.scores, scores); diff != "" || tokens != tc.tokens || unscored != tc.unscored {
				t.Errorf("%d tokens, unscored %q, (-want +got):\n%s", tokens, unscored, diff)
			}
		})
	}
}

// What the tables have learnt from is known; of a plan that does not tell, everything is.
func TestKnownTokens(t *testing.T) {
	p, _ := plans(t)
	silent := *p.layout
	silent.seen = nil
	ids := p.layout.tokenizer.Encode("func main() {")
	strange := append(append([]int32{}, ids...), 1<<30)
	for name, tc := range map[string]struct {
		layout *Layout
		ids    []int32
		known  float64
	}{
		"known":               {p.layout, ids, 1},
		"one beyond":          {p.layout, strange, float64(len(ids)) / float64(len(ids)+1)},
		"an older plan":       {&silent, strange, 1},
		"beyond what is read": {p.layout, append(slices.Repeat(ids[:1], scoredTokens), 1<<30), 1},
	} {
		if known, pairs := tc.layout.known(tc.ids); known != tc.known || pairs > 1 {
			t.Errorf("%s: %v of the tokens are known, and %v of their pairs, want %v", name, known, pairs, tc.known)
		}
	}
}

// Of a long prompt all parts count: its score is near that of all of its tokens, and not that of its beginning.
func TestLongPromptIsScoredAllOver(t *testing.T) {
	p, _ := plans(t)
	var ids []int32
	for _, text := range []string{"SELECT name FROM users WHERE id = 1;\n", "der Hund ist nicht im Haus, und das ist gut so.\n"} {
		part := p.layout.tokenizer.Encode(text)
		for n := len(ids) + readTokens/2; len(ids) < n; {
			ids = append(ids, part...)
		}
	}
	ids = ids[:readTokens]
	all, beginning := make([]float32, 4), make([]float32, 4)
	p.plan.Ranks.ScoreTokens(all, ids)
	p.plan.Ranks.ScoreTokens(beginning, ids[:scoredTokens])
	got, prefixes, read, _ := p.layout.score(prompt{ids: ids})
	if tokens := len(read); tokens != readTokens || len(prefixes) != readTokens/dispatch.PrefixBlock {
		t.Errorf("%d tokens and %d prefixes, want %d and %d", len(read), len(prefixes), readTokens, readTokens/dispatch.PrefixBlock)
	}
	apart := func(a, b []float32) (most float64) {
		for rank := range a {
			most = max(most, math.Abs(float64(a[rank]-b[rank])))
		}
		return most
	}
	if off, cut := apart(got, all), apart(beginning, all); off > .002 || cut < 5*off {
		t.Errorf("the score is off by %.4f, that of the beginning by %.4f", off, cut)
	}
}
