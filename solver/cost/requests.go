// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"context"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// RequestShare is the local share of one request: by rank if a request has one (attention DP), else a single element.
type RequestShare struct {
	// Predicted is the forecast share, Local the counted one.
	Predicted []float32
	Local     []float64
}

// DataParallelShares returns the shares of o.Requests, in that order, on each rank.
func DataParallelShares(ctx context.Context, t *trace.Trace, p *placement.Placement, forecast RequestForecast, o Options) ([]RequestShare, error) {
	if err := o.validate(t, p); err != nil {
		return nil, err
	}
	hosts := make([][][]int, len(p.Layers))
	for l := range hosts {
		hosts[l] = p.Local(l)
	}
	shares := make([]RequestShare, len(o.Requests))
	err := affinity.Parallel(ctx, len(shares), func(i int) {
		request := o.Requests[i]
		s := RequestShare{make([]float32, p.Ranks), make([]float64, p.Ranks)}
		forecast.Score(s.Predicted, request)
		for l := range hosts {
			for position := t.Offsets[request]; position < t.Offsets[request+1]; position++ {
				for _, expert := range t.Row(int(position), l) {
					for _, rank := range hosts[l][expert] {
						s.Local[rank]++
					}
				}
			}
		}
		for rank := range s.Local {
			s.Local[rank] /= float64(max(1, t.Length(request)) * len(hosts) * t.Model.TopK)
		}
		shares[i] = s
	})
	return shares, err
}

// TensorParallelShares returns the shares of o.Requests, in that order, if their tokens are dispatched in batches of
// equal shards.
func TensorParallelShares(ctx context.Context, t *trace.Trace, p *placement.Placement, forecast TokenForecast, o Options) ([]RequestShare, error) {
	if err := o.validate(t, p); err != nil {
		return nil, err
	}
	if o.Shards != EqualShards {
		return nil, fmt.Errorf("shards is %q; allowed is %s", o.Shards, EqualShards)
	}
	index := make(map[int]int32, len(o.Requests))
	for i, request := range o.Requests {
		index[request] = int32(i)
	}
	tokens := t.TokenCount(o.Requests)
	positions, owners := make([]int, 0, tokens), make([]int32, 0, tokens)
	for _, request := range trace.Shuffled(o.Requests, o.Seed) {
		for at := t.Offsets[request]; at < t.Offsets[request+1]; at++ {
			positions, owners = append(positions, int(at)), append(owners, index[request])
		}
	}
	layers := make([][]RequestShare, len(p.Layers))
	err := affinity.Parallel(ctx, len(layers), func(l int) {
		layers[l] = layerShares(newLayerRun(t, p, l, &o), forecast, positions, owners, len(o.Requests))
	})
	if err != nil {
		return nil, err
	}
	shares := make([]RequestShare, len(o.Requests))
	for i := range shares {
		shares[i] = RequestShare{make([]float32, 1), make([]float64, 1)}
		n := float64(max(1, t.Length(o.Requests[i])) * len(layers))
		for _, layer := range layers {
			shares[i].Predicted[0] += layer[i].Predicted[0] / float32(n)
			shares[i].Local[0] += layer[i].Local[0] / (n * float64(t.Model.TopK))
		}
	}
	return shares, nil
}

// layerShares sums, for each request, the scores of its tokens on their ranks and the local activations, in one layer.
func layerShares(r *layerRun, forecast TokenForecast, positions []int, owners []int32, requests int) []RequestShare {
	sums := make([]RequestShare, requests)
	for i := range sums {
		sums[i] = RequestShare{make([]float32, 1), make([]float64, 1)}
	}
	ranks := r.placement.Ranks
	shards := dispatch.NewWeightedShards(ranks, r.options.RankCapacity)
	scores := make([]float32, min(r.options.BatchTokens, len(positions))*ranks)
	for batch := range slices.Chunk(positions, r.options.BatchTokens) {
		for i, position := range batch {
			forecast.Score(scores[i*ranks:(i+1)*ranks], r.layer, position)
		}
		for i, rank := range shards.Assign(scores[:len(batch)*ranks]) {
			sum := &sums[owners[i]]
			sum.Predicted[0] += scores[i*ranks+rank]
			sum.Local[0] += float64(r.localOn(rank, batch[i]))
		}
		owners = owners[len(batch):]
	}
	return sums
}
