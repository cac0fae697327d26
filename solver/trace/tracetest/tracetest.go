// SPDX-License-Identifier: Apache-2.0

// Package tracetest generates routing traces for tests: token ids with Zipf frequencies, requests of several kinds of
// text, and experts in clusters that tokens and kinds of text prefer. Results on these traces show that code works, not
// its benefit on a real model.
package tracetest

import (
	"math/rand/v2"
	"strconv"

	"github.com/semmoe/operator/solver/trace"
)

// Shape is the size of a generated trace; every field except Groups must be at least 1.
type Shape struct {
	Experts, TopK, Layers, Vocabulary     int
	Domains, DocumentsPerDomain           int
	RequestsPerDocument, TokensPerRequest int
	// Noise is the percentage of activations that are drawn independently of token and domain.
	Noise int
	// Groups is the number of groups of consecutive experts of a gate that first selects two groups; 0 and 1 mean no
	// groups. Half a group must have at least TopK experts.
	Groups int
}

// Small is the shape of a trace that every algorithm handles in milliseconds.
var Small = Shape{
	Experts: 16, TopK: 2, Layers: 3, Vocabulary: 200, Domains: 4, DocumentsPerDomain: 6, RequestsPerDocument: 2, TokensPerRequest: 40, Noise: 30,
}

// Generate returns the trace of a shape and seed. The model's first layer is dense.
func Generate(s Shape, seed uint64) *trace.Trace {
	random := rand.New(rand.NewPCG(seed, 0))
	t := &trace.Trace{Offsets: []int64{0}, Model: trace.Model{
		Type: "generated", Experts: s.Experts, TopK: s.TopK, Vocabulary: s.Vocabulary, HiddenLayers: s.Layers + 1, HiddenSize: 1024,
		Config: `{"num_hidden_layers":` + strconv.Itoa(s.Layers+1) + `,"hidden_size":1024}`,
	}}
	if s.Groups > 1 {
		t.Model.Config = `{"n_group":` + strconv.Itoa(s.Groups) + `,` + t.Model.Config[1:]
	}
	for l := range s.Layers {
		t.Model.Layers = append(t.Model.Layers, l+1)
	}
	for d := range s.Domains {
		t.Model.Domains = append(t.Model.Domains, "domain-"+strconv.Itoa(d))
	}
	g := newGenerator(s, random)
	document := int32(0)
	for domain := range s.Domains {
		for range s.DocumentsPerDomain {
			for range s.RequestsPerDocument {
				g.request(t, domain)
				t.Documents = append(t.Documents, document)
				t.Domains = append(t.Domains, uint8(domain))
			}
			document++
		}
	}
	return t
}

type generator struct {
	shape  Shape
	random *rand.Rand
	zipf   *rand.Zipf
	// order is, per layer, a permutation of the experts in which adjacent experts form a cluster. tokenHome and
	// domainHome are, per layer, the position of the cluster of a token or a domain.
	order                 [][]int
	tokenHome, domainHome [][]int
	taken                 []bool
}

func newGenerator(s Shape, random *rand.Rand) *generator {
	g := &generator{
		shape: s, random: random, zipf: rand.NewZipf(random, 1.2, 4, uint64(s.Vocabulary-1)), taken: make([]bool, s.Experts),
	}
	for range s.Layers {
		g.order = append(g.order, random.Perm(s.Experts))
		g.tokenHome = append(g.tokenHome, g.places(s.Vocabulary))
		g.domainHome = append(g.domainHome, g.places(s.Domains))
	}
	return g
}

func (g *generator) places(n int) []int {
	places := make([]int, n)
	for i := range places {
		places[i] = g.random.IntN(g.shape.Experts)
	}
	return places
}

func (g *generator) request(t *trace.Trace, domain int) {
	for range 1 + g.random.IntN(2*g.shape.TokensPerRequest) {
		token := int(g.zipf.Uint64())
		if own := token - token%g.shape.Domains + domain; g.shape.Groups > 1 && own < g.shape.Vocabulary {
			// A kind of text has specific tokens, because requests are dispatched by their tokens.
			token = own
		}
		t.Tokens = append(t.Tokens, int32(token))
		for l := range g.shape.Layers {
			t.Experts = append(t.Experts, g.route(l, token, domain)...)
		}
	}
	t.Offsets = append(t.Offsets, int64(len(t.Tokens)))
}

func (g *generator) route(layer, token, domain int) []uint16 {
	clear(g.taken)
	if g.shape.Groups > 1 {
		return g.routeInGroups(layer, token, domain)
	}
	cluster := max(g.shape.Experts/4, g.shape.TopK)
	var experts []uint16
	for len(experts) < g.shape.TopK {
		place := g.random.IntN(g.shape.Experts)
		if g.random.IntN(100) >= g.shape.Noise {
			home := g.tokenHome[layer][token]
			if g.random.IntN(2) == 0 {
				home = g.domainHome[layer][domain]
			}
			place = (home/cluster*cluster + g.random.IntN(cluster)) % g.shape.Experts
		}
		if expert := g.order[layer][place]; !g.taken[expert] {
			g.taken[expert] = true
			experts = append(experts, uint16(expert))
		}
	}
	return experts
}

// routeInGroups selects the groups of the token's and the domain's homes, and similar experts within each group.
func (g *generator) routeInGroups(layer, token, domain int) []uint16 {
	size := g.shape.Experts / g.shape.Groups
	homes := [2]int{g.tokenHome[layer][token], g.domainHome[layer][domain]}
	for i := range homes {
		if g.random.IntN(100) < g.shape.Noise {
			homes[i] = g.random.IntN(g.shape.Experts)
		}
	}
	var experts []uint16
	for len(experts) < g.shape.TopK {
		home := homes[g.random.IntN(2)]
		place := g.random.IntN(size)
		if g.random.IntN(100) >= g.shape.Noise {
			// Every other expert is similar: runs of a group's experts cut all such clusters.
			place = (place/2*2 + home%2) % size
		}
		if expert := home/size*size + place; !g.taken[expert] {
			g.taken[expert] = true
			experts = append(experts, uint16(expert))
		}
	}
	return experts
}

// AddLookAhead adds a look-ahead of the given width to a trace: the actual experts, of which missPercent are replaced,
// followed by further experts. Scores halve from one expert to the next.
func AddLookAhead(t *trace.Trace, width, missPercent int, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 1))
	t.LookAhead = &trace.LookAhead{Width: width}
	taken := make([]bool, t.Model.Experts)
	for position := range t.Tokens {
		for l := range t.Model.Layers {
			clear(taken)
			routed := t.Row(position, l)
			score := uint16(trace.LookAheadScale / 2)
			for k := range width {
				expert := random.IntN(t.Model.Experts)
				if k < len(routed) && random.IntN(100) >= missPercent {
					expert = int(routed[k])
				}
				for taken[expert] {
					expert = (expert + 1) % t.Model.Experts
				}
				taken[expert] = true
				t.LookAhead.Experts = append(t.LookAhead.Experts, uint16(expert))
				t.LookAhead.Scores = append(t.LookAhead.Scores, score)
				score /= 2
			}
		}
	}
}
