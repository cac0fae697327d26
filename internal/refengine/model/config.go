// SPDX-License-Identifier: Apache-2.0

package model

import (
	"cmp"
	"encoding/json"
	"fmt"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// Config describes the architecture of a Qwen3-MoE model.
type Config struct {
	// Layers is the number of hidden layers. MoE is true for the layers with routed experts.
	Layers int
	MoE    []bool
	// Experts is the number of routed experts of an MoE layer. TopK is the number of experts that a token activates.
	// NormTopK normalizes the weights of the selected experts to a sum of 1.
	Experts, TopK int
	NormTopK      bool
	// Hidden, Vocab, Heads, KVHeads and HeadDim are the shapes of attention and embeddings.
	Hidden, Vocab           int
	Heads, KVHeads, HeadDim int
	// Intermediate and MoEIntermediate are the widths of a dense FFN and of one expert.
	Intermediate, MoEIntermediate int
	RMSNormEps                    float32
	RopeTheta                     float64
	// MaxPositions is the maximum sequence length of the model, or the shorter length that it was loaded for.
	MaxPositions int
	// TiedEmbeddings means that the embedding matrix is also the output head.
	TiedEmbeddings bool
}

// rawConfig is the part of config.json that the forward pass needs in addition to checkpoint.Config.
type rawConfig struct {
	Heads           int     `json:"num_attention_heads"`
	KVHeads         int     `json:"num_key_value_heads"`
	HeadDim         int     `json:"head_dim"`
	Intermediate    int     `json:"intermediate_size"`
	MoEIntermediate int     `json:"moe_intermediate_size"`
	RMSNormEps      float64 `json:"rms_norm_eps"`
	MaxPositions    int     `json:"max_position_embeddings"`
	NormTopK        bool    `json:"norm_topk_prob"`
	TiedEmbeddings  bool    `json:"tie_word_embeddings"`
	HiddenAct       string  `json:"hidden_act"`
	AttentionBias   bool    `json:"attention_bias"`
	SlidingWindow   bool    `json:"use_sliding_window"`
	// RopeTheta and RopeScaling are the fields of transformers 4, and RopeParameters the field of transformers 5.
	RopeTheta      float64         `json:"rope_theta"`
	RopeScaling    *ropeParameters `json:"rope_scaling"`
	RopeParameters *ropeParameters `json:"rope_parameters"`
	Quantization   json.RawMessage `json:"quantization_config"`
}

// ropeParameters is the value of rope_parameters and of rope_scaling, which used the name OldType for Type.
type ropeParameters struct {
	Theta   float64 `json:"rope_theta"`
	Type    string  `json:"rope_type"`
	OldType string  `json:"type"`
}

// kind returns the type of the rotary embedding, or the default type if there is none.
func (p ropeParameters) kind() string { return cmp.Or(p.Type, p.OldType, "default") }

// parseConfig parses and validates the architecture. It rejects features that this package does not support.
func parseConfig(base *checkpoint.Config) (*Config, error) {
	if modelType := cmp.Or(base.LayoutAs, base.ModelType); modelType != "qwen3_moe" {
		return nil, checkpoint.Invalidf("model_type %q: this engine runs qwen3_moe only", modelType)
	}
	var raw rawConfig
	if err := json.Unmarshal(base.Text, &raw); err != nil {
		return nil, checkpoint.Invalidf("config.json: %v", err)
	}
	if err := raw.checkSupported(); err != nil {
		return nil, err
	}
	c := &Config{
		Layers: base.Layers, MoE: make([]bool, base.Layers), Experts: base.Experts, TopK: base.ExpertsPerToken,
		NormTopK: raw.NormTopK, Hidden: base.HiddenSize, Vocab: base.VocabSize, Heads: raw.Heads,
		KVHeads: cmp.Or(raw.KVHeads, raw.Heads), HeadDim: raw.HeadDim, Intermediate: raw.Intermediate,
		MoEIntermediate: raw.MoEIntermediate, RMSNormEps: float32(raw.RMSNormEps), RopeTheta: raw.RopeTheta,
		MaxPositions: raw.MaxPositions, TiedEmbeddings: raw.TiedEmbeddings,
	}
	if c.HeadDim == 0 && c.Heads > 0 {
		c.HeadDim = c.Hidden / c.Heads
	}
	for _, rope := range []*ropeParameters{raw.RopeScaling, raw.RopeParameters} {
		if rope != nil && rope.Theta != 0 {
			c.RopeTheta = rope.Theta
		}
	}
	for _, l := range base.MoELayers {
		c.MoE[l] = true
	}
	return c, c.check(len(base.MoELayers) < base.Layers)
}

func (r rawConfig) checkSupported() error {
	isSet := func(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }
	switch {
	case r.HiddenAct != "silu":
		return checkpoint.Invalidf("config.json: hidden_act %q: this engine computes silu only", r.HiddenAct)
	case r.AttentionBias:
		return checkpoint.Invalidf("config.json: attention_bias true is not supported by this engine")
	case r.SlidingWindow:
		return checkpoint.Invalidf("config.json: use_sliding_window true is not supported by this engine")
	case r.RopeScaling != nil && r.RopeScaling.kind() != "default":
		return checkpoint.Invalidf("config.json: rope_scaling of type %.100q is not supported by this engine", r.RopeScaling.kind())
	case r.RopeParameters != nil && r.RopeParameters.kind() != "default":
		return checkpoint.Invalidf("config.json: rope_type %.100q: this engine computes default only", r.RopeParameters.kind())
	case isSet(r.Quantization):
		return checkpoint.Invalidf("config.json: quantization_config: this engine reads BF16, F16 and F32 weights only")
	}
	return nil
}

func (c *Config) check(hasDense bool) error {
	for _, field := range []struct {
		name  string
		value int
		used  bool
	}{
		{"num_attention_heads", c.Heads, true},
		{"num_key_value_heads", c.KVHeads, true},
		{"head_dim", c.HeadDim, true},
		{"max_position_embeddings", c.MaxPositions, true},
		{"moe_intermediate_size", c.MoEIntermediate, true},
		{"intermediate_size", c.Intermediate, hasDense},
	} {
		if field.used && (field.value < 1 || field.value > 1<<24) {
			return checkpoint.Invalidf("config.json: %s is %d; it must be a positive number", field.name, field.value)
		}
	}
	switch {
	case c.Heads%c.KVHeads != 0:
		return checkpoint.Invalidf("config.json: num_key_value_heads %d does not divide num_attention_heads %d", c.KVHeads, c.Heads)
	case c.HeadDim%2 != 0:
		return checkpoint.Invalidf("config.json: head_dim %d is odd; rotary embedding needs pairs", c.HeadDim)
	case !(c.RopeTheta > 0):
		return checkpoint.Invalidf("config.json: rope_theta is %v; it must be positive", c.RopeTheta)
	case !(c.RMSNormEps > 0):
		return checkpoint.Invalidf("config.json: rms_norm_eps is %v; it must be positive", c.RMSNormEps)
	}
	return nil
}

// String describes the model for logs.
func (c *Config) String() string {
	return fmt.Sprintf("%d layers, %d experts, top-%d, hidden %d, vocabulary %d", c.Layers, c.Experts, c.TopK, c.Hidden, c.Vocab)
}
