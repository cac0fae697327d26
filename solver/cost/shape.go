// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"cmp"
	"encoding/json"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/modelconfig"
	"github.com/semmoe/operator/solver/trace"
)

// Shape contains the cost parameters of a token; unknown ones are 0.
type Shape struct {
	// MoELayers is the number of layers with routed experts. TopK is the number of experts that a token activates in
	// each.
	MoELayers, TopK int
	// HiddenSize is the width of the residual stream.
	HiddenSize int
	// ActiveParameters is the number of parameters by which a token is multiplied.
	ActiveParameters int64
}

const (
	// defaultTopK and defaultHiddenSize are defaults for unknown values, common among large models.
	defaultTopK, defaultHiddenSize = 8, 4096
	// defaultWidth is the default number of active parameters of a layer, in squares of the hidden size: 4 for
	// attention, 8 for experts.
	defaultWidth = 12
)

// ShapeOf returns the shape of a trace's model.
func ShapeOf(m *trace.Model) Shape {
	return Shape{MoELayers: len(m.Layers), TopK: m.TopK, HiddenSize: m.HiddenSize, ActiveParameters: activeParameters(m)}
}

// activeParameters estimates the number of active parameters from the model's configuration. Attention counts as four
// square matrices, an upper bound for grouped and latent attention. Embeddings do not count, since they are looked up.
// It returns 0 if the sizes of experts are missing or implausible.
func activeParameters(m *trace.Model) int64 {
	var config struct {
		Intermediate    modelconfig.Size `json:"intermediate_size"`
		MoEIntermediate modelconfig.Size `json:"moe_intermediate_size"`
		Shared          float64          `json:"n_shared_experts"`
		SharedSize      float64          `json:"shared_expert_intermediate_size"`
	}
	if json.Unmarshal([]byte(m.TextConfig()), &config) != nil {
		return 0
	}
	hidden, moe, layers := float64(m.HiddenSize), float64(len(m.Layers)), float64(m.HiddenLayers)
	expert := float64(cmp.Or(config.MoEIntermediate, config.Intermediate))
	if expert <= 0 || hidden <= 0 {
		return 0
	}
	const matrices = 3 // gate, up and down
	attention := layers * 4 * hidden * hidden
	dense := (layers - moe) * matrices * hidden * float64(config.Intermediate)
	parameters := attention + dense + moe*matrices*hidden*(expert*(float64(m.TopK)+config.Shared)+config.SharedSize)
	if !(parameters > 0 && parameters < 1<<53) {
		return 0
	}
	return int64(parameters)
}

// Costs returns the costs of one token in microseconds: the exchange of its activations over the link in bf16, both
// ways, if none is local, and its computation at the rate of grouped GEMMs. Only their ratio matters.
func (s Shape) Costs(m Machines) dispatch.Costs {
	if s.TopK == 0 {
		s.TopK = defaultTopK
	}
	if s.HiddenSize == 0 {
		s.HiddenSize = defaultHiddenSize
	}
	if s.MoELayers == 0 {
		s.MoELayers = 1
	}
	if s.ActiveParameters == 0 {
		s.ActiveParameters = int64(s.MoELayers) * defaultWidth * int64(s.HiddenSize) * int64(s.HiddenSize)
	}
	const bf16, directions = 2, 2
	activations := float64(s.MoELayers * s.TopK)
	return dispatch.Costs{
		Exchange: directions * activations * float64(s.HiddenSize) * bf16 / m.Link.Rate(),
		Compute:  2 * float64(s.ActiveParameters) / m.Grouped.FlopsPerMicrosecond, // one multiplication and one addition for each
	}
}
