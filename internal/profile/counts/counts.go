// SPDX-License-Identifier: Apache-2.0

package counts

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/semmoe/operator/solver/trace"
)

// Model is the model whose experts the counted tokens activated.
type Model struct {
	// Digest identifies the checkpoint. It may be empty.
	Digest string
	// MoELayers are the indices of the layers with routed experts, in ascending order. Dense layers are counted.
	MoELayers []int
	// Experts is the number of routed experts of a layer. ExpertsPerToken is the number of experts that a token
	// activates in a layer.
	Experts, ExpertsPerToken int
	// Vocabulary is the number of token IDs.
	Vocabulary int
}

const (
	// maxExperts is the limit of the file format. maxVocabulary and maxLayers are well above all known models.
	maxExperts, maxVocabulary, maxLayers = 1 << 16, 1 << 24, 1 << 12
)

// Validate returns an error if the sizes of the model are out of range.
func (m Model) Validate() error {
	switch {
	case m.Experts < 1 || m.Experts > maxExperts:
		return fmt.Errorf("num_experts: %d is invalid: allowed is 1 to %d", m.Experts, maxExperts)
	case m.ExpertsPerToken < 1 || m.ExpertsPerToken > m.Experts:
		return fmt.Errorf("num_experts_per_tok: %d is invalid: allowed is 1 to num_experts, %d", m.ExpertsPerToken, m.Experts)
	case m.Vocabulary < 1 || m.Vocabulary > maxVocabulary:
		return fmt.Errorf("vocab_size: %d is invalid: allowed is 1 to %d", m.Vocabulary, maxVocabulary)
	case m.Vocabulary*len(m.MoELayers) > trace.MaxTokenLayers:
		return fmt.Errorf("vocab_size: %d is invalid for %d MoE layers: allowed is up to %d token IDs in all layers", m.Vocabulary, len(m.MoELayers), trace.MaxTokenLayers)
	case len(m.MoELayers) < 1 || len(m.MoELayers) > maxLayers:
		return fmt.Errorf("moe_layers: %d layers are invalid: allowed is 1 to %d", len(m.MoELayers), maxLayers)
	}
	for i, layer := range m.MoELayers {
		if layer < 0 || i > 0 && layer <= m.MoELayers[i-1] {
			return fmt.Errorf("moe_layers: %v is invalid: the layers must ascend", m.MoELayers)
		}
	}
	return nil
}

// Counts contains, for each MoE layer, how often each token ID activated each expert. It needs 12 bytes for each
// different pair, half of that again for pairs that are not merged yet, and 4 bytes for each token ID. It is not safe
// for concurrent use.
type Counts struct {
	Model Model
	// limit bounds the number of different pairs, over all layers; 0 means no bound.
	limit int
	// tokens is the number of counted tokens. occurrences is the number of occurrences of each ID [vocabulary].
	tokens      int64
	occurrences []uint32
	layers      []pairCounts
	// dropped is the number of tokens that were counted and dropped. undercount is the maximum number of occurrences
	// that a token lacks as a result.
	dropped, undercount int64
	bigrams             *Bigrams
}

// New returns counts without a bound.
func New(model Model) *Counts {
	return &Counts{Model: model, occurrences: make([]uint32, model.Vocabulary), layers: make([]pairCounts, len(model.MoELayers))}
}

// NewBounded returns counts of at most limit different pairs, with bigrams. When the limit is exceeded, the rarest
// tokens are dropped until half of the limit is free: lossy counting of whole tokens.
func NewBounded(model Model, limit int) *Counts {
	c := New(model)
	c.limit, c.bigrams = limit, &Bigrams{}
	return c
}

// Add counts the activations of tokens. experts has the shape [tokens, MoE layers, experts per token]. All IDs must be
// valid for the model.
func (c *Counts) Add(tokens []int32, experts []uint16) {
	top := c.Model.ExpertsPerToken
	at := 0
	for _, token := range tokens {
		c.occurrences[token]++
		for layer := range c.layers {
			for _, expert := range experts[at : at+top] {
				c.layers[layer].add(pairOf(token, expert))
			}
			at += top
		}
	}
	c.tokens += int64(len(tokens))
	c.bound()
}

// AddBigrams counts which tokens follow one another in a sequence. It panics if the counts are not bounded, because
// only bounded counts have bigrams.
func (c *Counts) AddBigrams(sequence []int32) { c.bigrams.add(sequence) }

// Merge adds the counts of other, which must be of the same model.
func (c *Counts) Merge(other *Counts) error {
	if !reflect.DeepEqual(c.Model, other.Model) {
		return fmt.Errorf("failed to merge counts of model %+v with counts of model %+v", other.Model, c.Model)
	}
	for id, occurrences := range other.occurrences {
		c.occurrences[id] = saturated(c.occurrences[id], occurrences)
	}
	for layer := range c.layers {
		c.layers[layer].merge()
		c.layers[layer].run = mergeRuns(c.layers[layer].run, other.layers[layer].merged())
	}
	c.tokens += other.tokens
	c.dropped += other.dropped
	c.undercount += other.undercount
	switch {
	case other.bigrams == nil:
	case c.bigrams == nil:
		c.bigrams = new(*other.bigrams)
	default:
		c.bigrams.merge(other.bigrams)
	}
	c.bound()
	return nil
}

// Tokens returns the number of counted tokens.
func (c *Counts) Tokens() int64 { return c.tokens }

// ForEach calls f with every pair of a MoE layer (0-based) and its number of occurrences, ordered by token and expert.
func (c *Counts) ForEach(layer int, f func(token int32, expert uint16, n uint32)) {
	all := c.layers[layer].merged()
	for i, p := range all.pairs {
		f(p.token(), p.expert(), all.counts[i])
	}
}

// Distinct returns the number of different token IDs.
func (c *Counts) Distinct() int {
	n := 0
	for _, occurrences := range c.occurrences {
		if occurrences > 0 {
			n++
		}
	}
	return n
}

// Skew returns the load of the busiest expert of a layer divided by the mean load, averaged over layers.
func (c *Counts) Skew() float64 {
	mean := float64(c.tokens) * float64(c.Model.ExpertsPerToken) / float64(c.Model.Experts)
	sum := 0.0
	loads := make([]int64, c.Model.Experts)
	for layer := range c.layers {
		clear(loads)
		c.ForEach(layer, func(_ int32, expert uint16, n uint32) { loads[expert] += int64(n) })
		sum += float64(slices.Max(loads)) / mean
	}
	return sum / float64(len(c.layers))
}
