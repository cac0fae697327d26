// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"fmt"
	"slices"
	"time"

	"github.com/semmoe/operator/solver/placement"
)

// Activations counts (token, layer, expert) triples of routed experts.
type Activations struct {
	// Local counts the activations that the rank serving the token computed with its own copy of the expert; Total
	// counts all.
	Local int64 `json:"local"`
	Total int64 `json:"total"`
}

// Rate returns the local activation rate; NaN without an activation.
func (a Activations) Rate() float64 { return float64(a.Local) / float64(a.Total) }

// Locality describes the location of experts relative to the rank that serves a request.
type Locality struct {
	// Rank is the serving rank, out of Ranks.
	Rank, Ranks int
	// Hosts returns the ranks with a copy of an expert of a layer (the model's index), ascending.
	Hosts func(layer, expert int) []int
	// CopyRule is how the engine selects among the copies.
	CopyRule placement.CopyRule
}

// Validate rejects an invalid rank.
func (l Locality) Validate() error {
	if l.Ranks <= 0 || l.Rank < 0 || l.Rank >= l.Ranks {
		return fmt.Errorf("rank is %d of %d: it must be 0 to one less than their number", l.Rank, l.Ranks)
	}
	return nil
}

// Contiguous returns the locality of a rank under the engine's own placement: the experts of each layer are distributed
// over the ranks in order.
func Contiguous(shape Shape, ranks, rank int) (Locality, error) {
	if ranks <= 0 || shape.Experts%ranks != 0 || rank < 0 || rank >= ranks {
		return Locality{}, fmt.Errorf("rank %d of %d does not fit %d experts", rank, ranks, shape.Experts)
	}
	perRank := shape.Experts / ranks
	all := make([]int, ranks)
	for i := range all {
		all[i] = i
	}
	hosts := func(_, expert int) []int { return all[expert/perRank : expert/perRank+1] }
	return Locality{Rank: rank, Ranks: ranks, Hosts: hosts}, nil
}

// Observation is the result of one sampled request.
type Observation struct {
	Time     time.Time `json:"time"`
	Revision string    `json:"revision"`
	// Plan is the full digest of the pod's plan; empty if the pod had none.
	Plan string `json:"plan,omitempty"`
	Rank int    `json:"rank"`
	Count
	// Forecast is what the tables predicted before the request ran; nil if the request was not scored.
	Forecast *Forecast `json:"forecast,omitempty"`
}

// Routed reports whether the request was routed according to the pod's plan, if there is one: a plan whose tables are
// not loaded yet has not been tried.
func (o Observation) Routed() bool { return o.Plan == "" || o.Forecast != nil }

// Forecast is the prediction of the forecast tables for a request's prompt. Shares are local shares of its activations,
// as far as the tables know them.
type Forecast struct {
	// Tables is the full digest of the plan whose tables scored the request: the pod's plan, or a plan with newer
	// tables for the same layout.
	Tables string `json:"tables"`
	// Best is the rank of the pod with the highest share, whether or not it served, and Highest is that share.
	// Predicted is the share of the rank that served.
	Best      int     `json:"best"`
	Highest   float64 `json:"highest"`
	Predicted float64 `json:"predicted"`
	// Known is the share of its first scored tokens that occur in the tables, Pairs the share of successive token
	// pairs; 1 if the tables do not contain this information.
	Known float64 `json:"known"`
	Pairs float64 `json:"pairs"`
}

// Validate rejects values that no tables produce.
func (f Forecast) Validate() error {
	if f.Best < 0 {
		return fmt.Errorf("best is %d: it cannot be negative", f.Best)
	}
	return finite(map[string]float64{"highest": f.Highest, "predicted": f.Predicted, "known": f.Known, "pairs": f.Pairs}, true)
}

// Count contains the activations of one request.
type Count struct {
	Activations
	// LayerGroups are the activations by groups of consecutive MoE layers, first layers first.
	LayerGroups []Activations `json:"layerGroups,omitempty"`
	// Tokens is the number of tokens whose activations were counted; TokenLayers is the sum of the MoE layers that they
	// passed.
	Tokens      int   `json:"tokens"`
	TokenLayers int64 `json:"tokenLayers"`
	// RemoteRanks is the number of distinct other ranks that contain a token's experts, summed over tokens and MoE
	// layers: the number of messages if a dispatch sends a token once to each rank.
	RemoteRanks int64 `json:"remoteRanks"`
	// SavedBytes is the data that was not moved between ranks because more than 1/ranks of the activations were local,
	// which any placement achieves: (local - total/ranks) x Shape.BytesPerActivation. It is negative if fewer were
	// local.
	SavedBytes float64 `json:"savedBytes,omitempty"`
}

// CountActivations counts the activations of a request that one rank served. experts has the shape
// [tokens][Shape.Layers][Shape.ExpertsPerToken]. IDs at or above the number of experts are shared experts that an
// engine reports with the routed ones; they are not counted. A token in a layer that lists a routed expert twice is not
// counted either: the engine did not fill this memory. For an expert with several copies on other ranks, the first one
// is counted as remote. The activations per expert, [MoE layer][expert] in one slice, are added to perExpert unless that
// is nil.
func CountActivations(experts []int32, shape Shape, at Locality, perExpert []int64) (Count, error) {
	row := shape.Layers * shape.ExpertsPerToken
	if row <= 0 || len(experts)%row != 0 {
		return Count{}, fmt.Errorf("%d expert ids do not fit %d layers of %d experts per token", len(experts), shape.Layers, shape.ExpertsPerToken)
	}
	if err := at.Validate(); err != nil {
		return Count{}, err
	}
	count := Count{LayerGroups: make([]Activations, shape.groups())}
	seen := make([]int64, at.Ranks) // by rank: the last TokenLayers value at which it was remote
	for token := 0; token < len(experts); token += row {
		before := count.TokenLayers
		for i, layer := range shape.MoELayers {
			start := token + layer*shape.ExpertsPerToken
			chosen := experts[start : start+shape.ExpertsPerToken]
			if repeats(chosen, shape.Experts) {
				continue
			}
			count.TokenLayers++
			group := &count.LayerGroups[shape.Group(i)]
			var layerCounts []int64
			if perExpert != nil {
				layerCounts = perExpert[i*shape.Experts : (i+1)*shape.Experts]
			}
			for _, expert := range chosen {
				if expert < 0 || int(expert) >= shape.Experts {
					continue
				}
				group.Total++
				if layerCounts != nil {
					layerCounts[expert]++
				}
				to := at.CopyRule.Copy(at.Hosts(layer, int(expert)), at.Rank)
				if to == at.Rank {
					group.Local++
				} else if seen[to] != count.TokenLayers {
					seen[to] = count.TokenLayers
					count.RemoteRanks++
				}
			}
		}
		if count.TokenLayers > before {
			count.Tokens++
		}
	}
	for _, group := range count.LayerGroups {
		count.Local += group.Local
		count.Total += group.Total
	}
	count.SavedBytes = (float64(count.Local) - float64(count.Total)/float64(at.Ranks)) * shape.BytesPerActivation()
	return count, nil
}

// repeats reports whether a token's experts in a layer contain a routed expert more than once.
func repeats(chosen []int32, experts int) bool {
	for i, expert := range chosen {
		if expert >= 0 && int(expert) < experts && slices.Contains(chosen[:i], expert) {
			return true
		}
	}
	return false
}
