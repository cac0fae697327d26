// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
)

func layoutOf(p planstest.Planned) *Layout { return New(p.Artifact.Digest, p.Plan, p.Tokenizer) }

// TestLayoutLocality checks that a layout reflects the slots of its placement, and rejects shapes that do not fit.
func TestLayoutLocality(t *testing.T) {
	p, _ := planstest.Solved(t)
	layout := layoutOf(p)
	for rank := range 4 {
		local, err := layout.Locality(planstest.Shape, 4, rank)
		if err != nil {
			t.Fatal(err)
		}
		for _, layer := range p.Plan.Placement.Layers {
			for slot, expert := range layer.Slots {
				if want := slot/p.Plan.Placement.SlotsPerRank == rank; slices.Contains(local.Hosts(layer.Layer, expert), rank) != want {
					t.Fatalf("layer %d, expert %d on rank %d: local is %v", layer.Layer, expert, rank, !want)
				}
			}
		}
	}
	wrong := func(change func(*lar.Shape)) lar.Shape {
		shape := planstest.Shape
		change(&shape)
		return shape
	}
	for name, tc := range map[string]struct {
		shape       lar.Shape
		ranks, rank int
	}{
		"other ranks":   {planstest.Shape, 8, 0},
		"no such rank":  {planstest.Shape, 4, 4},
		"other layers":  {wrong(func(s *lar.Shape) { s.Layers = 5 }), 4, 0},
		"other experts": {wrong(func(s *lar.Shape) { s.Experts = 64 }), 4, 0},
	} {
		if _, err := layout.Locality(tc.shape, tc.ranks, tc.rank); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestLayoutScore checks that a text is scored like its token ids, and that both match the table.
func TestLayoutScore(t *testing.T) {
	p, _ := planstest.Solved(t)
	layout := layoutOf(p)
	const text = "SELECT name FROM users WHERE id = 1"
	ids := p.Tokenizer.Encode(text)
	want := make([]float32, 4)
	p.Plan.Ranks.ScoreTokens(want, ids)

	withoutTable, withoutTokenizer := *layout, *layout
	withoutTable.table, withoutTokenizer.Tokenizer = nil, nil
	cases := map[string]struct {
		layout   *Layout
		prompt   wire.Prompt
		scores   []float32
		tokens   int
		unscored string
	}{
		"text":                      {layout, wire.Prompt{Texts: []string{text}}, want, len(ids), ""},
		"ids":                       {layout, wire.Prompt{IDs: ids}, want, len(ids), ""},
		"more than is scored":       {layout, wire.Prompt{IDs: ids, More: 7}, want, len(ids), ""},
		"tools, which are no text":  {layout, wire.Prompt{IDs: ids, Tools: `["f"]`}, want, len(ids), ""},
		"tools only":                {layout, wire.Prompt{Tools: `["f"]`}, nil, 0, NoPrompt},
		"nothing":                   {layout, wire.Prompt{}, nil, 0, NoPrompt},
		"no table":                  {&withoutTable, wire.Prompt{IDs: ids}, nil, 0, NoTable},
		"text without a tokenizer":  {&withoutTokenizer, wire.Prompt{Texts: []string{text}}, nil, 0, NoTokenizer},
		"ids without a tokenizer":   {&withoutTokenizer, wire.Prompt{IDs: ids}, want, len(ids), ""},
		"ids outside of vocabulary": {layout, wire.Prompt{IDs: []int32{1 << 30}}, make([]float32, 4), 1, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			scores, ids, tokens, unscored := tc.layout.Score(&tc.prompt, nil)
			if tokens != len(ids) {
				t.Errorf("%d tokens of %d ids", tokens, len(ids))
			}
			if diff := cmp.Diff(tc.scores, scores); diff != "" || tokens != tc.tokens || unscored != tc.unscored {
				t.Errorf("%d tokens, unscored %q, (-want +got):\n%s", tokens, unscored, diff)
			}
		})
	}
}

// TestKnownTokens checks the share of tokens that the tables were trained on. For a plan without this data, all tokens
// count as known.
func TestKnownTokens(t *testing.T) {
	p, _ := planstest.Solved(t)
	layout := layoutOf(p)
	silent := *layout
	silent.seen = nil
	ids := p.Tokenizer.Encode("func main() {")
	strange := append(append([]int32{}, ids...), 1<<30)
	for name, tc := range map[string]struct {
		layout *Layout
		ids    []int32
		known  float64
	}{
		"known":               {layout, ids, 1},
		"one beyond":          {layout, strange, float64(len(ids)) / float64(len(ids)+1)},
		"an older plan":       {&silent, strange, 1},
		"beyond what is read": {layout, append(slices.Repeat(ids[:1], ScoredTokens), 1<<30), 1},
	} {
		if known, pairs := tc.layout.Known(tc.ids); known != tc.known || pairs > 1 {
			t.Errorf("%s: %v of the tokens are known, and %v of their pairs, want %v", name, known, pairs, tc.known)
		}
	}
}

// TestLongPromptIsScoredAllOver checks that all parts of a long prompt count, of ids and of texts: its score is close to
// the score of all its tokens, and not to that of its start. The length of texts is estimated.
func TestLongPromptIsScoredAllOver(t *testing.T) {
	p, _ := planstest.Solved(t)
	layout := layoutOf(p)
	var long string
	for _, text := range []string{"SELECT name FROM users WHERE id = 1;\n", "der Hund ist nicht im Haus, und das ist gut so.\n"} {
		long += strings.Repeat(text, 128<<10/len(text))
	}
	ids := p.Tokenizer.Encode(long)
	all, beginning := make([]float32, 4), make([]float32, 4)
	p.Plan.Ranks.ScoreTokens(all, ids)
	p.Plan.Ranks.ScoreTokens(beginning, ids[:ScoredTokens])
	apart := func(a, b []float32) (most float64) {
		for rank := range a {
			most = max(most, math.Abs(float64(a[rank]-b[rank])))
		}
		return most
	}
	var lines []string
	for line := range strings.Lines(long) {
		lines = append(lines, line)
	}
	for name, prompt := range map[string]wire.Prompt{
		"ids": {IDs: ids}, "a text": {Texts: []string{long}}, "two texts": {Texts: []string{long[:100], long[100:]}}, "many texts": {Texts: lines},
	} {
		got, read, tokens, _ := layout.Score(&prompt, nil)
		if off, cut := apart(got, all), apart(beginning, all); off > .006 || cut < 5*off {
			t.Errorf("%s: the score is off by %.4f, that of the beginning by %.4f", name, off, cut)
		}
		if math.Abs(float64(tokens)/float64(len(ids))-1) > .02 {
			t.Errorf("%s: %d tokens, want about %d", name, tokens, len(ids))
		}
		if len(prompt.Texts) > 0 && len(read) > 2*ScoredTokens {
			t.Errorf("%s: %d tokens were read", name, len(read))
		}
	}
}

// TestSlices checks that slices are parts of the texts in order, of about the limit, and valid UTF-8 if the text is.
func TestSlices(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	alphabet := []rune("ab \n語é😀")
	for range 500 {
		texts := make([]string, 1+random.IntN(20))
		for i := range texts {
			text := make([]rune, random.IntN(1000)*random.IntN(3))
			for j := range text {
				text[j] = alphabet[random.IntN(len(alphabet))]
			}
			texts[i] = string(text)
		}
		limit := sliceBytes * (1 + random.IntN(16))
		joined, taken := strings.Join(texts, ""), slicesOf(texts, limit)
		size := 0
		for rest, i := joined, 0; i < len(taken); i++ {
			at := strings.Index(rest, taken[i])
			if at < 0 || !utf8.ValidString(taken[i]) {
				t.Fatalf("slice %d of %d, %q, is not a part of the rest of the text", i, len(taken), taken[i])
			}
			rest = rest[at:]
			size += len(taken[i])
		}
		if want := min(len(joined), limit); size < want/2 || size > want+want/2 {
			t.Errorf("%d bytes of %d in %d slices, want %d", size, len(joined), len(taken), want)
		}
	}
}

func TestToLogical(t *testing.T) {
	l := New("d", &solver.Plan{HiddenLayers: 3, Placement: &placement.Placement{
		Ranks: 2, Experts: 4, SlotsPerRank: 2, Layers: []placement.Layer{{Layer: 1, Slots: []int{2, 0, 3, 1}}},
	}}, nil)
	got := []int32{0, 1, 0, 1, 2, 3, 3, 3, 2, 3, 0, 0, 0, 0, 4, -1, 1, 1}
	l.ToLogical(got, 2)
	// Layer 0 is dense, layer 2 is not listed; 4 is a shared expert.
	if diff := cmp.Diff([]int32{0, 1, 2, 0, 2, 3, 3, 3, 3, 1, 0, 0, 0, 0, 4, -1, 1, 1}, got); diff != "" {
		t.Error(diff)
	}
}

// TestLayoutHasThePlansMachines checks that decisions use the machines that the plan is for.
func TestLayoutHasThePlansMachines(t *testing.T) {
	p, _ := planstest.Solved(t)
	if diff := cmp.Diff(cost.NodeOf(hardware.DefaultProfile()), layoutOf(p).Machines); diff != "" {
		t.Errorf("without a hardware profile: %s", diff)
	}
	slow, plan := *hardware.DefaultProfile(), *p.Plan
	slow.Name, slow.AllToAll.PerMicrosecond, slow.AllToAll.Large = "slow", 100e3, nil
	plan.Hardware = &slow
	if got := New(p.Artifact.Digest, &plan, nil).Machines; got.Profile != "slow" || got.Link.Rate() != 100e3 {
		t.Errorf("with one: %+v", got)
	}
	slow.Ranks, plan.RanksPerNode = 2, 2
	if got := New(p.Artifact.Digest, &plan, nil).Machines; !got.Nominal {
		t.Errorf("on two nodes: %+v", got)
	}
}
