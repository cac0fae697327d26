// SPDX-License-Identifier: Apache-2.0

package router

import (
	"math"
	"slices"
	"sync"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/wire"
	"github.com/semmoe/operator/solver/dispatch"
)

// forecast contains the scores of a layout for a request.
type forecast struct {
	layout *plans.Layout
	// scores are the expected local shares by rank. They are nil if the request was not scored; unscored is then the
	// reason.
	scores   []float32
	unscored string
	// best is the rank with the highest score.
	best int
	// known and pairs are the shares of the tokens, and of the token pairs, that the tables were trained on. They are
	// set for sampled requests only.
	known, pairs float64
	// tokens is the load of the request, with the tokenized length of its prompt.
	tokens int64
}

// tokenBuffers holds buffers for the tokens of a prompt, which are needed only to score it. keptTokens is the maximum
// length of a buffer that is reused: 64 KiB.
var tokenBuffers = sync.Pool{New: func() any { return new([]int32) }}

const keptTokens = 16 << 10

// score computes the forecast of a layout. It takes as long as tokenization; no lock may be held.
func (r *request) score(l *plans.Layout) {
	f := forecast{layout: l, tokens: r.tokens}
	from := r.prompt
	buffer := tokenBuffers.Get().(*[]int32)
	var ids []int32
	var tokens int
	if f.scores, ids, tokens, f.unscored = l.Score(&from, (*buffer)[:0]); f.unscored == plans.NoTokenizer && r.tokenize != nil {
		if prompt := r.tokenize(l.Digest, r.prompt.Texts); !prompt.Empty() {
			prompt.Tools = from.Tools
			from = prompt
			f.scores, ids, tokens, f.unscored = l.Score(&from, (*buffer)[:0])
		}
	}
	if f.scores != nil {
		f.best = slices.Index(f.scores, slices.Max(f.scores))
		f.tokens = int64(tokens+len(from.Tools)/wire.BytesPerToken+from.More) + r.prompt.Media.Tokens() + r.output + 1
		if r.sampled {
			f.known, f.pairs = l.Known(ids)
		}
		if len(from.Texts) > 0 && cap(ids) <= keptTokens {
			*buffer = ids
		}
	}
	tokenBuffers.Put(buffer)
	r.forecast = f
}

// hash computes the prefix hashes of the text, or of the token ids if the client sent ids. Text is hashed even if it is
// tokenized: its hashes are the same for all plans, and only a part of a long prompt is tokenized. No lock may be held.
func (r *request) hash() {
	if r.hashed {
		return
	}
	r.hashed = true
	if texts := r.prompt.AllTexts(); len(texts) > 0 {
		r.prefixes = dispatch.TextPrefixHashes(nil, texts)
	} else {
		r.prefixes = dispatch.PrefixHashes(nil, r.prompt.IDs)
	}
}

// ask returns the request to the scheduler of a plan. The latest forecast must belong to that plan.
func (r *request) ask(plan *scheduled) dispatch.Request {
	asked := dispatch.Request{Tokens: int(r.tokens)}
	if plan != nil && r.forecast.scores != nil {
		asked.Tokens = int(r.forecast.tokens)
	}
	asked.Prompt = max(0, asked.Tokens-int(r.output))
	return asked
}

// on returns the forecast for the rank that served the request. The forecast must have scores.
func (f *forecast) on(rank int) *lar.Forecast {
	return &lar.Forecast{
		Tables: f.layout.Tables, Best: f.best, Highest: share(float64(f.scores[f.best])), Predicted: share(float64(f.scores[rank])),
		Known: share(f.known), Pairs: share(f.pairs),
	}
}

// share rounds a share to six decimals, more than the precision of a table. This halves the length of a list of shares
// as JSON.
func share(value float64) float64 { return math.Round(1e6*value) / 1e6 }
