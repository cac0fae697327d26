// SPDX-License-Identifier: Apache-2.0

package pipeline

import "github.com/semmoe/operator/solver/cost/hardware"

// Pass is one pass of prompts through a model on ranks that have both attention and experts.
type Pass struct {
	// Ranks is the number of ranks, Tokens the number of tokens over all ranks, in prompts of Sequence tokens.
	Ranks, Tokens, Sequence int
	// TensorParallel means that the ranks share the heads and the widths of every token. Without it, each rank has its
	// own prompts.
	TensorParallel bool
}

// PassesOfPrompt returns the number of passes per prompt: more than one if a prompt is longer than a pass.
func (p Pass) PassesOfPrompt() int {
	room := p.Tokens
	if !p.TensorParallel {
		room = max(1, p.Tokens/p.Ranks)
	}
	return (p.Sequence + room - 1) / room
}

// OutsideExperts returns the time of a pass in microseconds without routed experts and their exchanges: attention with
// its projections, shared experts, layers without experts, and with tensor parallelism the collectives around
// attention. Embeddings, norms and sampling are omitted.
func (s *Shape) OutsideExperts(h *hardware.Profile, p Pass) float64 {
	ranks, tokens := float64(p.Ranks), float64(p.Tokens)
	// parts is the number of ranks that share a matrix, rows the number of tokens per rank.
	parts, rows, exchange := 1.0, tokens/ranks, 0.0
	if p.TensorParallel {
		const bf16 = 2
		bytes := tokens * float64(s.Hidden) * bf16
		parts, rows, exchange = ranks, tokens, h.ReduceScatter.Microseconds(bytes)+h.AllGather.Microseconds(bytes)
	}
	samples, sequence := rows/float64(p.Sequence), float64(p.Sequence)
	attention := exchange + h.Attention.Microseconds(hardware.CausalAttention(samples, float64(s.Heads)/parts, sequence, float64(s.QueryDim), float64(s.ValueDim)))
	for _, weights := range s.Projections() {
		attention += h.Dense.Microseconds(weights/parts, rows)
	}
	block := func(width int) float64 {
		if width == 0 {
			return 0
		}
		return h.Dense.Block(float64(s.Hidden*width)/parts, rows)
	}
	return float64(s.HiddenLayers)*attention + float64(s.MoELayers)*block(s.SharedSize) + float64(s.HiddenLayers-s.MoELayers)*block(s.DenseSize)
}
