package cost

import (
	"github.com/semmoe/operator/solver/cost/volume"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// VolumeReport is what the dispatch and the combination of one MoE layer send in a batch: means over whole batches, MoE layers and arrival orders.
type VolumeReport struct {
	// BatchTokens are those of a batch over all ranks, Batches how many were counted in each layer of the first order. With fewer tokens than that
	// there is one batch of what there is, and BatchTokens is their number.
	BatchTokens int `json:"batch_tokens"`
	Batches     int `json:"batches"`
	// Ranks and RanksPerNode are the topology, HiddenSize what a row consists of; it is 0, and all bytes are headers, where the trace does not tell it.
	Ranks        int             `json:"ranks"`
	RanksPerNode int             `json:"ranks_per_node"`
	HiddenSize   int             `json:"hidden_size"`
	Objectives   []volume.Volume `json:"objectives"`
}

// addVolume fills in the traffic of runs [run][layer].
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
