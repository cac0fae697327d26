// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
)

const (
	// ScoredTokens is the default of Layout.Scored. More tokens do not increase the local activation rate of longer
	// prompts (docs/benchmarks/router.md).
	ScoredTokens = 1 << 10
	// sliceBytes is the approximate length of a slice of text: about 16 tokens.
	sliceBytes = 16 * wire.BytesPerToken
)

// Layout is a plan as the router uses it: the placement of the experts and the table that scores tokens. It is
// immutable.
type Layout struct {
	// Digest is the full digest of the plan. Ranks is the number of ranks that it is for.
	Digest string
	Ranks  int
	// root is the digest of the plan that the placement was solved for: this plan, or an earlier plan with other
	// tables. placement is the SHA-256 of placement.json.
	root, placement string
	// Tables is the digest of the plan that the table belongs to. It differs from Digest after newer tables replaced
	// the plan's own.
	Tables string
	// hosts contains the ranks with a copy, by layer (the model's index; nil for a dense layer) and expert.
	hosts [][][]int
	// copies is the rule that selects a copy of an expert.
	copies placement.CopyRule
	// slots contains the order of the experts in a permuted checkpoint, by layer (nil for a layer in original order):
	// the new expert j is the old expert slots[layer][j]. It is nil if experts have several copies, which a checkpoint
	// cannot contain.
	slots [][]int
	// Shape is the model shape that determines the cost of a token. Machines determine the cost per unit.
	Shape    cost.Shape
	Machines cost.Machines
	// table is nil if requests have no rank (tensor-parallel attention).
	table *affinity.RankTable
	// seen describes the training data of the table; nil for plans of earlier versions, which do not contain it.
	seen *affinity.Seen
	// Tokenizer is nil if the checkpoint has no readable tokenizer. Then only token ids can be scored, and texts if an
	// engine returns their token ids.
	Tokenizer *tokenizer.Tokenizer
	// Scored is the maximum number of tokens of a prompt that are scored. Of a longer prompt, about this many are taken
	// evenly: single token ids, or slices of the text, of which the rest is not tokenized. Their mean share is close to
	// the mean share of all tokens.
	Scored int
}

// New returns the layout of a plan with this digest. tokens may be nil.
func New(digest string, p *solver.Plan, tokens *tokenizer.Tokenizer) *Layout {
	l := &Layout{
		Digest: digest, root: cmp.Or(p.Layout, digest), Tables: digest, Ranks: p.Placement.Ranks,
		hosts: make([][][]int, p.HiddenLayers), copies: p.Placement.CopyRule, table: p.Ranks, seen: p.Seen, Tokenizer: tokens, Scored: ScoredTokens,
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

// readLayout reads the plan of a digest from a directory that bundle.Fetch has filled, with its tokenizer unless
// tablesOnly. unusable is the reason why the tokenizer cannot be used; the layout is usable without it.
func readLayout(dir, digest string, tablesOnly bool) (l *Layout, unusable, err error) {
	p, files, err := plan.Read(dir)
	if err != nil {
		return nil, nil, err
	}
	if files.Digest != digest {
		return nil, nil, fmt.Errorf("%s contains plan %s, not %s", dir, files.Digest, digest)
	}
	var tokens *tokenizer.Tokenizer
	if !tablesOnly {
		tokens, unusable = tokenizer.Load(filepath.Join(dir, bundle.TokenizerFile))
	}
	l = New(digest, p, tokens)
	l.placement = files.Manifest.LayoutDigest
	return l, unusable, nil
}

// WithTables returns the layout with the tables of another plan, which must have the same placement.
func (l *Layout) WithTables(from *Layout) (*Layout, error) {
	switch {
	case from == l:
		return l, nil
	case from.root != l.root:
		return nil, fmt.Errorf("the tables of plan %s are for the layout of plan %s, but the pods have the layout of plan %s", from.Digest, from.root, l.root)
	case from.placement != l.placement:
		return nil, fmt.Errorf("plan %s has another placement than plan %s, whose layout it names", from.Digest, l.root)
	case (from.table == nil) != (l.table == nil):
		return nil, fmt.Errorf("the tables of plan %s are for another kind of attention than plan %s", from.Digest, l.Digest)
	}
	swapped := *l
	swapped.table, swapped.seen, swapped.Tables = from.table, from.seen, from.Digest
	return &swapped, nil
}

// Locality returns which experts of a model with this shape are local to a rank.
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

// fits returns an error unless the plan is for a model of this shape.
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

// Reasons why Score cannot score a request.
const (
	NoTable     = "no_table"     // the plan is for requests without a rank
	NoPrompt    = "no_prompt"    // the body has no readable tokens
	NoTokenizer = "no_tokenizer" // the prompt is text, and there is no tokenizer
)

// Score predicts the local share of a request on each rank from its prompt. ids are the tokens that were read: the ids
// of the prompt, or its tokenized texts, which Score appends to the buffer. tokens is the length of the prompt, which is
// estimated if not all of a text was read. unscored is the reason if it cannot score the request.
func (l *Layout) Score(p *wire.Prompt, buffer []int32) (scores []float32, ids []int32, tokens int, unscored string) {
	if l.table == nil {
		return nil, nil, 0, NoTable
	}
	ids = p.IDs
	scored := evenly(ids, l.Scored)
	if tokens = len(ids); len(p.Texts) > 0 {
		if l.Tokenizer == nil {
			return nil, nil, 0, NoTokenizer
		}
		read, all := 0, 0
		ids = append(buffer, p.IDs...)
		for _, text := range slicesOf(p.Texts, l.Scored*wire.BytesPerToken) {
			ids = l.Tokenizer.AppendTokens(ids, text)
			read += len(text)
		}
		for _, text := range p.Texts {
			all += len(text)
		}
		scored, tokens = ids, len(p.IDs)+int(float64(len(ids)-len(p.IDs))*float64(all)/float64(max(1, read)))
	}
	if len(ids) == 0 {
		return nil, nil, 0, NoPrompt
	}
	scores = make([]float32, l.Ranks)
	l.table.ScoreTokens(scores, scored)
	return scores, ids, tokens, ""
}

// slicesOf returns the texts, or slices of them with about limit bytes. Slices are taken evenly; their positions vary
// like those of evenly. They begin and end between words where there are words.
func slicesOf(texts []string, limit int) []string {
	all := 0
	for _, text := range texts {
		all += len(text)
	}
	n := limit / sliceBytes
	if 4*all <= 5*limit || n == 0 { // slices would save less than they cost
		return texts
	}
	taken := make([]string, 0, n)
	text, before := 0, 0 // the text of the position, and the bytes before it
	for i := range n {
		begin, end := all*i/n, all*(i+1)/n // the share of this slice
		at := max(before, begin+scatter(begin, end-begin-sliceBytes+1))
		for left := sliceBytes; left > 0 && text < len(texts); {
			if at >= before+len(texts[text]) {
				before += len(texts[text])
				text++
				continue
			}
			from := texts[text][at-before:]
			if at > before {
				from = from[wordEnd(from, 0):]
			}
			from = from[:wordEnd(from, left)]
			if from != "" {
				taken = append(taken, from)
			}
			left -= max(1, len(from))
			at = before + len(texts[text])
		}
	}
	return taken
}

// wordEnd returns the first position at or after a position that is before a space, or between characters if the next
// 32 bytes have no space.
func wordEnd(text string, at int) int {
	if at >= len(text) {
		return len(text)
	}
	if next := strings.IndexByte(text[at:min(len(text), at+32)], ' '); next >= 0 {
		return at + next
	}
	for at < len(text) && !utf8.RuneStart(text[at]) {
		at++
	}
	return at
}

// scatter returns a number below limit, from the bits of a position.
func scatter(at, limit int) int {
	return int(uint32(at)*2654435761>>16) % max(1, limit) // Knuth's multiplicative hash: the golden ratio of 32 bits
}

// Known returns the share of the first tokens of a request that the table was trained on, and the share of pairs of
// successive tokens. It returns 1 if the plan does not contain the training data.
func (l *Layout) Known(ids []int32) (tokens, pairs float64) {
	if l.seen == nil {
		return 1, 1
	}
	return l.seen.Shares(ids[:min(len(ids), l.Scored)])
}

// evenly returns at most limit tokens, one of each of as many equal shares. The position within each share varies,
// because text is repetitive: every n-th token of a list may be the same.
func evenly(tokens []int32, limit int) []int32 {
	if len(tokens) <= limit {
		return tokens
	}
	taken := make([]int32, limit)
	for i := range taken {
		begin, end := len(tokens)*i/limit, len(tokens)*(i+1)/limit
		taken[i] = tokens[begin+scatter(begin, end-begin)]
	}
	return taken
}

// Renumbers reports whether Logical can renumber the experts of a permuted checkpoint of a model of that shape.
func (l *Layout) Renumbers(shape lar.Shape) bool { return l.slots != nil && l.fits(shape) == nil }

// Logical returns the logical id of an expert of a permuted checkpoint. Ids in layers that the plan does not place, and
// ids of no routed expert, stay unchanged.
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
