// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Workload is a way to compose the served requests from the requests of a trace.
type Workload string

// The workloads.
const (
	// Recorded serves the requests as recorded.
	Recorded Workload = "recorded"
	// SharedPrefix serves groups of requests that begin with the same system prompt.
	SharedPrefix Workload = "shared-prefix"
	// MultiTurn serves conversations: every turn begins with the whole previous turn.
	MultiTurn Workload = "multi-turn"
)

// Workloads lists all workloads.
var Workloads = []Workload{Recorded, SharedPrefix, MultiTurn}

// ParseWorkload returns the workload with the given name.
func ParseWorkload(name string) (Workload, error) {
	for _, w := range Workloads {
		if string(w) == name {
			return w, nil
		}
	}
	return "", fmt.Errorf("workload %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Workloads), "[]"))
}

// workloadStream is the stream of random numbers of workloads.
const workloadStream = 0x776f726b

const (
	// minPrompt and maxPrompt bound a system prompt, in tokens.
	minPrompt, maxPrompt = 256, 1024
	// minGroup and maxGroup bound the number of requests with a common system prompt.
	minGroup, maxGroup = 8, 32
	// minTurn and maxTurn bound the tokens that a turn adds to its conversation: question and answer.
	minTurn, maxTurn = 128, 256
	// maxConversation is the maximum number of tokens of a conversation; a longer document becomes several
	// conversations.
	maxConversation = 2048
	// turnPause is the mean number of other conversations that begin between two turns of one conversation.
	turnPause = 16
)

// Build returns the trace of a workload made of the listed requests, and its requests to serve: all of them. Tokens
// keep their recorded experts, and a request keeps its domain.
//
// SharedPrefix: the requests of a domain, in seeded order, are divided into groups of 8 to 32. The first few requests
// of a group, cut to 256 to 1,024 tokens, form its system prompt, which precedes each of the other requests.
//
// MultiTurn: the requests of a document, concatenated, form a conversation. After 2,048 tokens another conversation
// begins, also within a longer request. A conversation is cut into turns of 128 to 256 tokens, question and answer. A
// turn is everything from the beginning of the conversation to the end of the turn. The turns of a conversation are
// consecutive requests with a separate document number.
func (w Workload) Build(t *Trace, requests []int, seed uint64) (*Trace, []int) {
	if w == Recorded {
		return t, requests
	}
	b := &builder{from: t, to: &Trace{Model: t.Model, Offsets: []int64{0}}, random: rand.New(rand.NewPCG(seed, workloadStream))}
	if w == SharedPrefix {
		b.groups(requests)
	} else {
		b.conversations(requests)
	}
	return b.to, b.to.AllRequests()
}

// builder composes a trace from spans of another trace.
type builder struct {
	from, to *Trace
	random   *rand.Rand
}

// span is a range of positions of the trace.
type span struct{ begin, end int64 }

// add appends a request that consists of spans, with the domain of the request like.
func (b *builder) add(document int32, like int, spans ...span) {
	width := int64(len(b.from.Model.Layers) * b.from.Model.TopK)
	for _, s := range spans {
		b.to.Tokens = append(b.to.Tokens, b.from.Tokens[s.begin:s.end]...)
		b.to.Experts = append(b.to.Experts, b.from.Experts[s.begin*width:s.end*width]...)
	}
	b.to.Offsets = append(b.to.Offsets, int64(len(b.to.Tokens)))
	b.to.Documents = append(b.to.Documents, document)
	if b.from.Domains != nil {
		b.to.Domains = append(b.to.Domains, b.from.Domains[like])
	}
}

// conversations adds the conversations of all documents.
func (b *builder) conversations(requests []int) {
	conversation := int32(0)
	for _, document := range b.from.Subset(requests).documents() {
		var spans []span
		first, tokens := 0, int64(0)
		for _, i := range document.requests {
			r := requests[i]
			for _, piece := range b.pieces(r) {
				n := piece.end - piece.begin
				if tokens > 0 && tokens+n > maxConversation {
					b.conversation(conversation, first, spans)
					conversation++
					spans, tokens = nil, 0
				}
				if tokens == 0 {
					first = r
				}
				spans = append(spans, piece)
				tokens += n
			}
		}
		b.conversation(conversation, first, spans)
		conversation++
	}
}

// pieces returns the span of a request, cut at the maximum length of a conversation: turns repeat all previous tokens,
// so their total grows quadratically with the length.
func (b *builder) pieces(request int) (pieces []span) {
	end := b.from.Offsets[request+1]
	for begin := b.from.Offsets[request]; begin < end; begin += maxConversation {
		pieces = append(pieces, span{begin, min(begin+maxConversation, end)})
	}
	return pieces
}

// conversation adds the turns of one conversation, which consists of whole spans.
func (b *builder) conversation(number int32, first int, spans []span) {
	said := []span{}
	left := int64(0)
	for i, s := range spans {
		for s.begin < s.end {
			if left == 0 {
				left = int64(minTurn + b.random.IntN(maxTurn-minTurn+1))
			}
			n := min(left, s.end-s.begin)
			said = append(said, span{s.begin, s.begin + n})
			s.begin += n
			if left -= n; left == 0 || i == len(spans)-1 && s.begin == s.end {
				b.add(number, first, said...)
			}
		}
	}
}

func (b *builder) groups(requests []int) {
	byDomain := map[int][]int{}
	for _, r := range requests {
		domain := 0
		if b.from.Domains != nil {
			domain = int(b.from.Domains[r])
		}
		byDomain[domain] = append(byDomain[domain], r)
	}
	group := int32(0)
	for domain := range 256 {
		list := byDomain[domain]
		b.random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		for len(list) > 0 {
			n := min(minGroup+b.random.IntN(maxGroup-minGroup+1), len(list))
			b.group(group, list[:n])
			list = list[n:]
			group++
		}
	}
}

// group adds the requests of a group except those that form its system prompt. A single request is added unchanged.
func (b *builder) group(document int32, list []int) {
	left := int64(minPrompt + b.random.IntN(maxPrompt-minPrompt+1))
	var prompt []span
	for len(list) > 1 && left > 0 {
		begin := b.from.Offsets[list[0]]
		end := min(b.from.Offsets[list[0]+1], begin+left)
		prompt = append(prompt, span{begin, end})
		left -= end - begin
		list = list[1:]
	}
	for _, r := range list {
		b.add(document, r, slices.Concat(prompt, []span{{b.from.Offsets[r], b.from.Offsets[r+1]}})...)
	}
}

// Arrivals returns the requests of the workload's trace in a seeded order of arrival. The order is random for most
// workloads. Conversations begin in random order, and about 16 other conversations begin between two turns.
func (w Workload) Arrivals(t *Trace, requests []int, seed uint64) []int {
	order := Shuffled(requests, seed)
	if w != MultiTurn {
		return order
	}
	// A conversation begins at the position of its first turn in the shuffled order.
	begin := map[int32]float64{}
	for _, r := range order {
		if _, known := begin[t.Documents[r]]; !known {
			begin[t.Documents[r]] = float64(len(begin))
		}
	}
	random := rand.New(rand.NewPCG(seed, workloadStream))
	when := make(map[int]float64, len(order))
	for _, r := range slices.Sorted(slices.Values(order)) {
		when[r] = begin[t.Documents[r]]
		begin[t.Documents[r]] += 2 * turnPause * random.Float64()
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(when[a], when[b]), a-b) })
	return order
}
