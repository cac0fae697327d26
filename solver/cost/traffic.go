// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"github.com/semmoe/operator/solver/cost/volume"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// VolumeReport is the traffic of dispatch and combine of one MoE layer in a batch, as means over whole batches, MoE
// layers and arrival orders.
type VolumeReport struct {
	// BatchTokens is the number of tokens in a batch over all ranks. Batches is the number of batches counted in each
	// layer of the first order. If there are fewer tokens than a batch, all tokens are one batch, and BatchTokens is
	// their number.
	BatchTokens int `json:"batch_tokens"`
	Batches     int `json:"batches"`
	// Ranks and RanksPerNode are the topology. HiddenSize is the size of a row; it is 0 if the trace does not contain
	// it, and all bytes are then headers.
	Ranks        int             `json:"ranks"`
	RanksPerNode int             `json:"ranks_per_node"`
	HiddenSize   int             `json:"hidden_size"`
	Objectives   []volume.Volume `json:"objectives"`
}

// addVolume sets the traffic of runs [run][layer].
func (r *Report) addVolume(t *trace.Trace, p *placement.Placement, runs [][]*tally, o *Options) {
	var mean volume.Messages
	for _, run := range runs {
		for _, layer := range run {
			messages := layer.messages.Messages()
			mean.Add(&messages, 1/float64(len(runs)*len(run)))
		}
	}
	first := runs[0][0]
	v := &VolumeReport{BatchTokens: o.BatchTokens, Batches: first.messages.Batches(), Ranks: p.Ranks, RanksPerNode: o.RanksPerNode, HiddenSize: t.Model.HiddenSize}
	if v.Batches == 0 {
		v.Batches, v.BatchTokens = 1, first.messages.Tokens()
	}
	v.Objectives = mean.Volumes(volume.Row{HiddenSize: t.Model.HiddenSize, TopK: t.Model.TopK}, p.Ranks, p.SlotsPerRank)
	r.Volume = v
}
