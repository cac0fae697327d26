package plans

import (
	"cmp"
	"fmt"
	"path/filepath"

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/internal/tokenizer"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
)

// scoredTokens bounds how many of the tokens of a prompt are scored: of more, as many are taken evenly, whose mean share is near that
// of all.
const scoredTokens = 16 << 10

// Layout is one plan as the router uses it: where its experts are, and what is local where. It is immutable.
type Layout struct {
	// Digest is the full digest of the plan, Ranks the number of ranks that it is for.
	Digest string
	Ranks  int
	// root is the digest of the plan that the placement was solved for, this one's or an earlier one's with other tables, and
	// placement the sha256 of placement.json.
	root, placement string
	// Tables is the digest of the plan whose table this is: another's where newer ones were swapped in.
	Tables string
	// hosts are the ranks with a copy, by layer (the model's index; nil for a dense one) and expert.
	hosts [][][]int
	// copies is the plan's rule for copies.
	copies placement.CopyRule
	// slots are the experts in the order in which a permuted checkpoint has them, by layer (nil for one that stays as it
	// is): new expert j is old expert slots[layer][j]. It is nil where experts have several copies, which no checkpoint can.
	slots [][]int
	// Shape is what a token costs by, Machines what it costs on.
	Shape    cost.Shape
	Machines cost.Machines
	// table is nil where requests have no rank (attention tensor parallelism).
	table *affinity.RankTable
	// seen is what the table has learnt from; nil for plans of earlier versions, which do not tell.
	seen *affinity.Seen
	// Tokenizer is nil where the checkpoint has none that can be read: then only token ids can be scored, and the texts for
	// which an engine tells them.
	Tokenizer *tokenizer.Tokenizer
}

// New prepares a plan of a digest; tokens may be nil.
func New(digest string, p *solver.Plan, tokens *tokenizer.Tokenizer) *Layout {
	l := &Layout{
		Digest: digest, root: cmp.Or(p.Layout, digest), Tables: digest, Ranks: p.Placement.Ranks,
		hosts: make([][][]int, p.HiddenLayers), copies: p.Placement.CopyRule, table: p.Ranks, seen: p.Seen, Tokenizer: tokens,
		Machines: cost.MachinesOf(p.Machines(), p.Placement.Ranks, cmp.Or(p.RanksPerNode, solver.DefaultEvaluation().RanksPerNode)),
	}
	if l.Shape = p.Shape; l.Shape.MoELayers == 0 {
		l.Shape.MoELayers = len(p.Placement.Layers)
	}
	for i, layer := range p.Placement.Layers {
		l.hosts[layer.Layer] = p.Placement.Hosts(i)
	}
	if !p.Placement.Redundant() {
		l.slots = make([][]int, p.HiddenLayers)
		for _, layer := range p.Placement.Layers {
			l.slots[layer.Layer] = layer.Slots
		}
	}
	return l
}

// readLayout reads the plan of a digest from a directory that bundle.Fetch has made, with its tokenizer unless tablesOnly. unusable
// is what keeps the tokenizer from being used: the layout is usable without.
func readLayout(dir, digest string, tablesOnly bool) (l *Layout, unusable, err error) {
	p, files, err := plan.Read(dir)
	if err != nil {
		return nil, nil, err
	}
	if files.Digest != digest {
		return nil, nil, fmt.Errorf("%s holds plan %s, not %s", dir, files.Digest, digest)
	}
	var tokens *tokenizer.Tokenizer
	if !tablesOnly {
		tokens, unusable = tokenizer.Load(filepath.Join(dir, bundle.TokenizerFile))
	}
	l = New(digest, p, tokens)
	l.placement = files.Manifest.LayoutDigest
	return l, unusable, nil
}

// WithTables is the layout with the tables of another plan, which must have the same placement.
func (l *Layout) WithTables(from *Layout) (*Layout, error) {
	switch {
	case from == l:
		return l, nil
	case from.root != l.root:
		return nil, fmt.Errorf("the tables of plan %s are for the layout of plan %s; the pods have that of plan %s", from.Digest, from.root, l.root)
	case from.placement != l.placement:
		return nil, fmt.Errorf("plan %s has another placement than plan %s, whose layout it names", from.Digest, l.root)
	case (from.table == nil) != (l.table == nil):
		return nil, fmt.Errorf("the tables of plan %s are for another kind of attention than plan %s", from.Digest, l.Digest)
	}
	swapped := *l
	swapped.table, swapped.seen, swapped.Tables = from.table, from.seen, from.Digest
	return &swapped, nil
}

// Locality tells which experts of a model of that shape are local to a rank.
func (l *Layout) Locality(shape lar.Shape, ranks, rank int) (lar.Locality, error) {
	if ranks != l.Ranks || rank < 0 || rank >= ranks {
		return lar.Locality{}, fmt.Errorf("rank %d of %d does not fit a plan for %d", rank, ranks, l.Ranks)
	}
	if err := l.fits(shape); err != nil {
		return lar.Locality{}, err
	}
	hosts := func(layer, expert int) []int { return l.hosts[layer][expert] }
	return lar.Locality{Rank: rank, Ranks: ranks, Hosts: hosts, CopyRule: l.copies}, nil
}

// fits requires that the plan is for a model of that shape.
func (l *Layout) fits(shape lar.Shape) error {
	if shape.Layers != len(l.hosts) {
		return fmt.Errorf("a model of %d layers does not fit a plan for %d", shape.Layers, len(l.hosts))
	}
	for _, layer := range shape.MoELayers {
		if len(l.hosts[layer]) != shape.Experts {
			return fmt.Errorf("layer %d: %d experts do not fit a plan for %d", layer, shape.Experts, len(l.hosts[layer]))
		}
	}
	return nil
}

// Why Score cannot score a request.
const (
	NoTable     = "no_table"     // the plan is one for requests without a rank
	NoPrompt    = "no_prompt"    // the tokens of the body cannot be told
	NoTokenizer = "no_tokenizer" // the prompt is text, and there is no tokenizer
)

// Score forecasts the local share of a request on each rank from its prompt, and hashes its beginnings, tools first; ids are the tokens
// that were read. Where it cannot, it says why.
func (l *Layout) Score(p wire.Prompt) (scores []float32, prefixes []uint64, ids []int32, unscored string) {
	if l.table == nil {
		return nil, nil, nil, NoTable
	}
	ids = p.IDs
	if len(p.Texts) > 0 {
		if l.Tokenizer == nil {
			return nil, nil, nil, NoTokenizer
		}
		for _, text := range p.Texts {
			ids = l.Tokenizer.AppendTokens(ids, text)
		}
	}
	if len(ids) == 0 {
		return nil, nil, nil, NoPrompt
	}
	scores = make([]float32, l.Ranks)
	seen := ids[:min(len(ids), wire.ReadTokens)]
	l.table.ScoreTokens(scores, evenly(seen, scoredTokens))
	if p.Tools != "" {
		seen = append(p.ToolIDs(), seen...)
	}
	prefixes = dispatch.PrefixHashes(make([]uint64, 0, len(seen)/dispatch.PrefixBlock), seen)
	return scores, prefixes, ids, ""
}

// Known is the share of the first tokens of a request that the table has learnt from, and of the pairs of successive ones; 1 where
// the plan does not tell.
func (l *Layout) Known(ids []int32) (tokens, pairs float64) {
	if l.seen == nil {
		return 1, 1
	}
	return l.seen.Shares(ids[:min(len(ids), scoredTokens)])
}

// evenly takes one token of every n, with the smallest n by which there are at most so many. Which of the n changes from one to
// the next: text repeats itself, and every n-th token of a list may be the same one.
func evenly(tokens []int32, most int) []int32 {
	step := (len(tokens) + most - 1) / most
	if step <= 1 {
		return tokens
	}
	taken := make([]int32, 0, most)
	for begin := 0; begin < len(tokens); begin += step {
		at := begin + int(uint32(begin)*2654435761>>16)%step // the multiplier is Knuth's: near the golden ratio of 32 bits
		taken = append(taken, tokens[min(at, len(tokens)-1)])
	}
	return taken
}

// Renumbers reports whether Logical can renumber the experts of a permuted checkpoint of a model of that shape.
func (l *Layout) Renumbers(shape lar.Shape) bool { return l.slots != nil && l.fits(shape) == nil }

// Logical is the number that an expert of a permuted checkpoint has in the model. In layers that the plan does not place experts keep
// theirs, and so do ids that are none of a routed expert.
func (l *Layout) Logical(layer int, id int32) int32 {
	if slots := l.slots[layer]; id >= 0 && int(id) < len(slots) {
		return int32(slots[id])
	}
	return id
}

// ToLogical renumbers the experts of a permuted checkpoint, [tokens][layers][top], in place.
func (l *Layout) ToLogical(experts []int32, top int) {
	for at, id := range experts {
		experts[at] = l.Logical(at/top%len(l.slots), id)
	}
}
