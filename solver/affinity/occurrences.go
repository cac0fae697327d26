// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"math/rand/v2"

	"github.com/semmoe/operator/solver/trace"
)

// Occurrences contains a sample of single tokens of a profile with the experts that each activated. The number of
// distinct ranks per token cannot be computed from counts, because it depends on which experts occur together.
type Occurrences struct {
	// Experts is the number of experts, TopK the activations per occurrence.
	Experts, TopK int
	// Layers contains the experts of each MoE layer [layers][occurrences × top-k].
	Layers [][]uint16
	// Unit is the entity that is assigned to one rank: the token id with attention TP, the request with attention DP,
	// numbered from 0 in order of appearance [occurrences]. Units is their number.
	Unit  []int32
	Units int
	// Scale is the number of tokens of the profile per occurrence.
	Scale float64
}

// Len returns the number of occurrences.
func (o *Occurrences) Len() int { return len(o.Unit) }

// maxUnits is the maximum number of requests in a sample by requests: each request needs several tokens to determine
// its rank.
const maxUnits = 1000

// SampleOccurrences draws at most n tokens of the listed requests, uniformly at random. The units are requests if
// byRequest is set, and then a sample of the requests.
func SampleOccurrences(t *trace.Trace, requests []int, n int, byRequest bool, seed uint64) *Occurrences {
	random := rand.New(rand.NewPCG(seed, 0x6f6363757272))
	all := t.TokenCount(requests)
	if byRequest && len(requests) > maxUnits {
		sample := make([]int, maxUnits)
		for i, at := range random.Perm(len(requests))[:maxUnits] {
			sample[i] = requests[at]
		}
		requests = sample
	}
	o := &Occurrences{Experts: t.Model.Experts, TopK: t.Model.TopK, Layers: make([][]uint16, len(t.Model.Layers))}
	left := t.TokenCount(requests)
	missing := min(n, left)
	o.Scale = float64(all) / float64(max(missing, 1))
	name := map[int32]int32{}
	for r, request := range requests {
		for p := int(t.Offsets[request]); p < int(t.Offsets[request+1]); p++ {
			// Selection sampling: every subset of the required size is equally likely.
			take := random.IntN(left) < missing
			left--
			if !take {
				continue
			}
			missing--
			unit := t.Tokens[p]
			if byRequest {
				unit = int32(r)
			}
			if _, known := name[unit]; !known {
				name[unit] = int32(len(name))
			}
			o.Unit = append(o.Unit, name[unit])
			for l := range o.Layers {
				o.Layers[l] = append(o.Layers[l], t.Row(p, l)...)
			}
		}
	}
	o.Units = len(name)
	return o
}

// Grouped returns the occurrences in terms of groups of size consecutive experts; size must divide the number of
// experts.
func (o *Occurrences) Grouped(size int) *Occurrences {
	g := *o
	g.Experts = o.Experts / size
	g.Layers = make([][]uint16, len(o.Layers))
	for l, experts := range o.Layers {
		g.Layers[l] = make([]uint16, len(experts))
		for i, e := range experts {
			g.Layers[l][i] = e / uint16(size)
		}
	}
	return &g
}
