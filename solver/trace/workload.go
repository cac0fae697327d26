package trace

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Workload says how the requests of a trace are put together to those that are served.
type Workload string

// The workloads.
const (
	// Recorded are the requests as they are.
	Recorded Workload = "recorded"
	// SharedPrefix are groups of requests that begin with the same system prompt.
	SharedPrefix Workload = "shared-prefix"
	// MultiTurn are conversations: every turn begins with all of the turn before.
	MultiTurn Workload = "multi-turn"
)

// Workloads lists all workloads.
var Workloads = []Workload{Recorded, SharedPrefix, MultiTurn}

// ParseWorkload returns the workload of that name.
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
	// leastPrompt and mostPrompt bound a system prompt, in tokens.
	leastPrompt, mostPrompt = 256, 1024
	// leastGroup and mostGroup bound the number of requests that share one.
	leastGroup, mostGroup = 8, 32
	// leastTurn and mostTurn bound what a turn adds to its conversation, in tokens: what is asked and what is answered.
	leastTurn, mostTurn = 128, 256
	// mostConversation bounds the tokens of a conversation: a longer document is several.
	mostConversation = 2048
	// turnPause is how many other conversations begin, in the mean, between two turns of one.
	turnPause = 16
)

// Build returns the trace of a workload made of the listed requests, and the requests of it that are served: all. Tokens keep the
// experts that were recorded for them, and a request keeps its domain.
//
// SharedPrefix: the requests of a domain, in seeded order, are parted into groups of 8 to 32. The first few of a group, cut to 256
// to 1,024 tokens, are its system prompt, which stands before each of the others.
//
// MultiTurn: the requests of a document, one after the other, are a conversation; after 2,048 tokens another begins, within a request
// that is longer. It is cut
// into turns of 128 to 256 tokens, what is asked and what is answered; a turn is everything from the beginning of the conversation to
// the turn's end. The turns of a conversation follow one another and have a document number of their own.
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

// builder puts a trace together from pieces of another.
type builder struct {
	from, to *Trace
	random   *rand.Rand
}

// span are positions of the trace.
type span struct{ begin, end int64 }

// add appends a request that is made of spans.
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

// conversations makes those of all documents.
func (b *builder) conversations(requests []int) {
	conversation := int32(0)
	for _, document := range b.from.Subset(requests).documents() {
		var spans []span
		first, tokens := 0, int64(0)
		for _, i := range document.requests {
			r := requests[i]
			for _, piece := range b.pieces(r) {
				n := piece.end - piece.begin
				if tokens > 0 && tokens+n > mostConversation {
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

// pieces are a request's span, cut where it is longer than a conversation may be: turns repeat what was said, so that their tokens grow
// with its square.
func (b *builder) pieces(request int) (pieces []span) {
	end := b.from.Offsets[request+1]
	for begin := b.from.Offsets[request]; begin < end; begin += mostConversation {
		pieces = append(pieces, span{begin, min(begin+mostConversation, end)})
	}
	return pieces
}

// conversation adds the turns of one, which is made of whole spans.
func (b *builder) conversation(number int32, first int, spans []span) {
	said := []span{}
	left := int64(0)
	for i, s := range spans {
		for s.begin < s.end {
			if left == 0 {
				left = int64(leastTurn + b.random.IntN(mostTurn-leastTurn+1))
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
			n := min(leastGroup+b.random.IntN(mostGroup-leastGroup+1), len(list))
			b.group(group, list[:n])
			list = list[n:]
			group++
		}
	}
}

// group adds the requests of a group but those that its system prompt is made of; one request alone is added as it is.
func (b *builder) group(document int32, list []int) {
	left := int64(leastPrompt + b.random.IntN(mostPrompt-leastPrompt+1))
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

// Arrivals returns the requests of the workload's trace in a seeded order of arrival: any for most, and conversations that begin
// in any order, between two turns of which some 16 others begin.
func (w Workload) Arrivals(t *Trace, requests []int, seed uint64) []int {
	order := Shuffled(requests, seed)
	if w != MultiTurn {
		return order
	}
	// A conversation begins when the first of its turns comes in the shuffled order.
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
