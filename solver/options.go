// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"fmt"
	"time"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Options are the inputs of Solve in addition to the trace.
type Options struct {
	// Ranks is the EP size; it must divide the number of experts.
	Ranks     int
	Attention placement.Attention
	Algorithm placement.Algorithm
	// Forecast is the forecast of the tables, or AutoForecast.
	Forecast Forecast
	// RedundantSlots is the number of slots per rank for copies of experts of other ranks.
	RedundantSlots int
	// RedundantMemory, if positive, is the memory of a rank for copies in bytes, over all layers. Solve then chooses
	// RedundantSlots, which must be 0 in the input. It requires the objective Time and the algorithm Auto.
	RedundantMemory int64
	// CopyRule is the engine's rule for choosing among the copies of an expert. A copy that the engine does not use is
	// not local. Empty means the rule of Current.
	CopyRule placement.CopyRule
	// Objective is the quantity that placement and tables minimize, and by which a solved placement is compared with
	// the default one. Empty means placement.Activation. RanksPerNode defines which ranks share a node; 0 means that of
	// DefaultEvaluation.
	Objective    placement.Objective
	RanksPerNode int
	// BatchTokens are the batch sizes in service, in tokens over all ranks. All entries have equal weight, so a size
	// listed n times counts n times. The objective Time minimizes the mean time over them, and plans are compared by
	// it. Empty means DefaultBatchTokens.
	BatchTokens []int
	// Unshuffled describes attention tensor parallelism in an engine that leaves tokens where attention puts them:
	// tokens are assigned to ranks round-robin, regardless of the tables. The local activation rate is then the same
	// under every placement, so a different objective is required.
	Unshuffled bool
	// Hardware is the profile of the target machines, used to model times and to weigh messages; nil means
	// hardware.DefaultProfile.
	Hardware *hardware.Profile
	// Constraints restrict the placement.
	Constraints placement.Constraints
	// PreserveGroups keeps the gate's groups of experts together, so that a checkpoint permuted by the placement
	// computes the same. The trace's model config defines the groups; without groups it has no effect.
	PreserveGroups bool
	// Embeddings, if given, define which tokens are similar: a token that the train requests lack is scored like its
	// nearest neighbors among the tokens they contain, unless the held-out requests show that this is worse.
	Embeddings *embedding.Table
	// Current is the placement in service, if any. Auto starts from it, which is faster and moves few experts.
	Current *placement.Placement
	// Fresh starts the search from scratch although Current is set, because Current was solved for different traffic.
	Fresh bool
	// TrainPercent is the percentage of requests to train on, split by whole documents. The others score the plan.
	TrainPercent int
	// Seed makes split, search and evaluation reproducible.
	Seed uint64
	// TimeBudget limits the search; 0 means no limit.
	TimeBudget time.Duration
	// Progress, if set, receives each step's name and progress. It is called from several goroutines.
	Progress func(step string, done, total int)
}

// maxTableBytes bounds the score table of a plan: readers of plans reject larger files.
const maxTableBytes = 1 << 30

// checkTable rejects options whose score table would exceed maxTableBytes.
func (o *Options) checkTable(m *trace.Model) error {
	const scoreBytes = 2
	size := m.Vocabulary * o.Ranks * scoreBytes
	if o.Attention == placement.TensorParallel {
		size = m.Vocabulary * len(m.Layers) * min(o.best(), o.Ranks) * 2 * scoreBytes // ranks and their scores
	}
	if size > maxTableBytes {
		return fmt.Errorf("the score table of forecast %s has %d bytes for %d ranks, vocab_size %d and %d MoE layers; the maximum is %d",
			o.Forecast, size, o.Ranks, m.Vocabulary, len(m.Layers), maxTableBytes)
	}
	return nil
}

// best returns the number of ranks that a table stores per token (attention TP).
func (o *Options) best() int {
	if o.Forecast.Contextual() || o.Forecast == LookBack {
		return contextRanks
	}
	return bestRanks
}

// groups returns the number of expert groups to keep together.
func (o *Options) groups(m *trace.Model) (int, error) {
	if !o.PreserveGroups {
		return 1, nil
	}
	return m.Groups()
}
