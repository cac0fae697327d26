// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"slices"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/lab/prompts"
	"github.com/semmoe/operator/solver/trace"
)

// requestBaseline is a forecast of requests that does not use the table of their tokens.
type requestBaseline struct {
	name     string
	forecast cost.RequestForecast
}

// requestBaselines returns the baselines for a plan's placement.
func (s *study) requestBaselines(p *solver.Plan, o *CompareOptions) []requestBaseline {
	baselines := []requestBaseline{
		{prefixHash, hashForecast{s.trace.Request}}, {promptClusters, s.newKindForecast(p, s.clusters(o.Embeddings))},
	}
	if s.trace.Domains != nil {
		baselines = append(baselines, requestBaseline{domainLabel, s.newKindForecast(p, s.trace.Domains)})
	}
	return baselines
}

// kindForecast scores a request only by its kind: the mean shares of the train requests of that kind.
type kindForecast struct {
	kinds  []uint8
	shares [256][]float32
}

// newKindForecast returns the forecast for the kinds of all requests of the trace. A kind without train requests gives
// all ranks the same score.
func (s *study) newKindForecast(p *solver.Plan, kinds []uint8) *kindForecast {
	var local [256][]int
	for kind := range local {
		local[kind] = make([]int, p.Placement.Ranks)
	}
	for l := range p.Placement.Layers {
		hosts := p.Placement.Local(l)
		for _, r := range s.train {
			ranks := local[kinds[r]]
			for position := int(s.trace.Offsets[r]); position < int(s.trace.Offsets[r+1]); position++ {
				for _, expert := range s.trace.Row(position, l) {
					for _, rank := range hosts[expert] {
						ranks[rank]++
					}
				}
			}
		}
	}
	f := &kindForecast{kinds: kinds}
	for kind, ranks := range local {
		total := 0
		for _, n := range ranks {
			total += n
		}
		f.shares[kind] = make([]float32, len(ranks))
		for rank, n := range ranks {
			f.shares[kind][rank] = float32(n) / float32(max(total, 1))
		}
	}
	return f
}

// Score fills dst with the shares of the request's kind.
func (f *kindForecast) Score(dst []float32, request int) { copy(dst, f.shares[f.kinds[request]]) }

const (
	// promptSize is the number of dimensions of a projected prompt.
	promptSize = 256
	// maxPoints bounds the coordinates of all prompts that are clustered together, 8 bytes each. Above it, a sample of
	// the prompts is clustered.
	maxPoints = 1 << 24
	// clustersPerRank is the number of clusters of prompts for each rank. With one, clusters and ranks would coincide,
	// and the baseline would be worse.
	clustersPerRank = 4
)

// clusters returns, for every request, the nearest cluster of train prompts.
func (s *study) clusters(table *embedding.Table) []uint8 {
	prompt, size := prompts.Projected(s.trace.Model.Vocabulary, promptSize, s.options.Seed).Prompt, promptSize
	if table != nil {
		prompt, size = func(tokens []int32) []float32 { return prompts.Mean(table, tokens) }, table.Size
	}
	picked := s.train
	if n := maxPoints / size; n < len(picked) {
		picked = trace.Shuffled(picked, s.options.Seed)[:n]
	}
	train := make([][]float32, len(picked))
	for i, r := range picked {
		train[i] = prompt(s.trace.Request(r))
	}
	space := prompts.NewSpace(train)
	for i, point := range train {
		train[i] = space.Direction(point)
	}
	found := prompts.KMeans(train, min(clustersPerRank*s.options.Ranks, 256), s.options.Seed)
	kinds := make([]uint8, s.trace.Requests())
	for r := range kinds {
		kinds[r] = uint8(found.Nearest(space.Direction(prompt(s.trace.Request(r)))))
	}
	return kinds
}

// hashForecast sends requests with the same first dispatch.PrefixBlock tokens (or all tokens of a shorter request) to
// the same rank.
type hashForecast struct{ tokens func(request int) []int32 }

// Score gives the full score to the rank of the hash.
func (f hashForecast) Score(dst []float32, request int) {
	clear(dst)
	tokens := f.tokens(request)
	hashes := dispatch.PrefixHashes(nil, slices.Concat(tokens[:min(len(tokens), dispatch.PrefixBlock)], make([]int32, dispatch.PrefixBlock)))
	dst[hashes[0]%uint64(len(dst))] = 1
}
