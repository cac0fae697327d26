// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net"
	"slices"
	"time"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/wire"
)

const (
	// observedFor is the time after which the cached tokens of a request that waits are looked up again.
	observedFor = time.Second
	// leadingBytes is the number of bytes that are tokenized at once, about 1,000 tokens.
	leadingBytes = 4 << 10
	// maxIndivisibleBytes is the maximum size of a text that is tokenized if it cannot be cut.
	maxIndivisibleBytes = 64 << 10
)

var (
	// exactRoutes are the routes on which engines compute the prompt of the body as it is, without a chat template.
	exactRoutes = []string{"/v1/completions", "/generate", "/inference/v1/generate"}
	// keyedMembers are members of requests whose blocks have more keys than their tokens, or that cut the prompt.
	keyedMembers = []string{"cache_salt", "extra_key", "lora_path", "truncate_prompt_tokens"}
)

// isExact reports whether an engine computes exactly the tokens of the one prompt of a request.
func isExact(path string, b wire.Body, p *wire.Prompt) bool {
	one := len(p.Texts) == 1 && len(p.IDs) == 0 || len(p.Texts) == 0 && len(p.IDs) > 0 && !p.Nested
	return one && p.Media.Parts == 0 && slices.Contains(exactRoutes, path) && !slices.ContainsFunc(keyedMembers, b.Has)
}

// leadingTokens tokenizes the beginning of a prompt, as far as it is needed.
type leadingTokens struct {
	tokenizer *tokenizer.Tokenizer
	ids       []int32
	rest      string
}

// first returns at least n tokens, if there are as many.
func (l *leadingTokens) first(n int) []int32 {
	for len(l.ids) < n && l.rest != "" {
		head := l.tokenizer.Head(l.rest, leadingBytes)
		l.ids, l.rest = l.tokenizer.AppendTokens(l.ids, head), l.rest[len(head):]
	}
	return l.ids
}

// observe looks up the cached tokens of a request. It takes as long as tokenization; no lock may be held.
func (p *Pool) observe(r *request) {
	r.observed = nil
	if p.events == nil || !r.exact {
		return
	}
	prompt := kvevents.Prompt{Tokens: r.leading.first, Model: r.model}
	if r.leading.ids == nil {
		r.leading.ids = r.prompt.IDs
		if len(r.prompt.Texts) > 0 {
			if r.forecast.layout == nil || r.forecast.layout.Tokenizer == nil {
				return // estimated
			}
			r.leading.tokenizer, r.leading.rest = r.forecast.layout.Tokenizer, r.prompt.Texts[0]
			if len(r.leading.rest) > maxIndivisibleBytes && len(r.leading.tokenizer.Head(r.leading.rest, leadingBytes)) > maxIndivisibleBytes {
				r.leading.rest = ""
				return
			}
		}
	}
	if r.leading.tokenizer != nil {
		prompt.MayPrecede = r.leading.tokenizer.IsSpecial
	}
	r.observed, r.observedAt = p.events.Cached(prompt), p.now()
}

// mustObserve reports whether the cached tokens of a request were looked up too long ago. The first lookup follows the
// hashes of the prefixes.
func (p *Pool) mustObserve(r *request, now time.Time) bool {
	return r.observed != nil && now.Sub(r.observedAt) >= observedFor
}

// countObserved counts by what the cached tokens of a request on its place are known.
func (p *Pool) countObserved(r *request, at place) {
	if p.events != nil {
		_, known := r.observed[placeOf(at)]
		p.events.CountRequest(known)
	}
}

// placeOf returns the place with the KV events of a place.
func placeOf(at place) kvevents.Place { return kvevents.Place{Address: at.on.Address, Rank: at.rank} }

// eventTargets returns the places of backends with KV events. The engine has one prefix cache if requests have no rank.
func eventTargets(backends []discovery.Backend) (targets []kvevents.Target) {
	for _, b := range backends {
		host, _, err := net.SplitHostPort(b.Address)
		if err != nil || b.Ranks == 0 && b.Width > 1 {
			continue // the engine selects among several caches
		}
		vocabulary := 0
		if b.Shape != nil {
			vocabulary = b.Shape.Vocabulary
		}
		for rank := range max(1, b.Ranks) {
			targets = append(targets, kvevents.Target{Place: kvevents.Place{Address: b.Address, Rank: rank}, Host: host, Ranks: max(1, b.Ranks), Vocabulary: vocabulary})
		}
	}
	return targets
}
