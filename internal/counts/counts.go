package counts

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/semmoe/operator/solver/trace"
)

// Model is the model that the counted tokens activated.
type Model struct {
	// Digest identifies the checkpoint; it may be empty.
	Digest string
	// MoELayers are the model's indices of the layers with routed experts, ascending.
	MoELayers []int
	// Experts is the number of routed experts of a layer, ExpertsPerToken how many of them a token activates.
	Experts, ExpertsPerToken int
	// Vocabulary is the number of token ids.
	Vocabulary int
}

const (
	// maxExperts is what a file can hold, maxVocabulary and maxLayers are well above all known models.
	maxExperts, maxVocabulary, maxLayers = 1 << 16, 1 << 24, 1 << 12
)

// Validate refuses a model that nothing can be counted of.
func (m Model) Validate() error {
	switch {
	case m.Experts < 1 || m.Experts > maxExperts:
		return fmt.Errorf("num_experts is %d; allowed is 1 to %d", m.Experts, maxExperts)
	case m.ExpertsPerToken < 1 || m.ExpertsPerToken > m.Experts:
		return fmt.Errorf("num_experts_per_tok is %d; allowed is 1 to num_experts, %d", m.ExpertsPerToken, m.Experts)
	case m.Vocabulary < 1 || m.Vocabulary > maxVocabulary:
		return fmt.Errorf("vocab_size is %d; allowed is 1 to %d", m.Vocabulary, maxVocabulary)
	case m.Vocabulary*len(m.MoELayers) > trace.MaxTokenLayers:
		return fmt.Errorf("vocab_size is %d for %d MoE layers; allowed is up to %d token ids in all layers", m.Vocabulary, len(m.MoELayers), trace.MaxTokenLayers)
	case len(m.MoELayers) < 1 || len(m.MoELayers) > maxLayers:
		return fmt.Errorf("%d MoE layers; allowed is 1 to %d", len(m.MoELayers), maxLayers)
	}
	for i, layer := range m.MoELayers {
		if layer < 0 || i > 0 && layer <= m.MoELayers[i-1] {
			return fmt.Errorf("moe_layers: %v is not an ascending list of layers", m.MoELayers)
		}
	}
	return nil
}

// Counts are, for each MoE layer, how often each token id activated each expert. Memory is 12 bytes for each different
// pair, half of that again for what is still to be merged, and 4 bytes for each token id. It is not safe for concurrent use.
type Counts struct {
	Model Model
	// limit bounds the different pairs, over all layers; 0 is no bound.
	limit int
	// tokens is how many tokens are counted, occurrences how often each id is among them [vocabulary].
	tokens      int64
	occurrences []uint32
	layers      []pairCounts
	// dropped is how many tokens were counted and are no more, undercount the most that a token's occurrences can be short
	// by for that.
	dropped, undercount int64
	bigrams             *Bigrams
}

// New returns counts without a bound.
func New(model Model) *Counts {
	return &Counts{Model: model, occurrences: make([]uint32, model.Vocabulary), layers: make([]pairCounts, len(model.MoELayers))}
}

// NewBounded returns counts of at most limit different pairs, and of bigrams. Whenever the bound is met, the rarest tokens go
// until half of it is free: lossy counting, by whole tokens.
func NewBounded(model Model, limit int) *Counts {
	c := New(model)
	c.limit, c.bigrams = limit, &Bigrams{}
	return c
}

// Add counts the activations of tokens; experts is [tokens, MoE layers, experts per token]. All ids must be the model's.
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

// AddBigrams counts which tokens follow one another in a sequence. The counts must be bounded ones.
func (c *Counts) AddBigrams(sequence []int32) { c.bigrams.add(sequence) }

// Merge adds the counts of another, which must be of the same model.
func (c *Counts) Merge(other *Counts) error {
	if !reflect.DeepEqual(c.Model, other.Model) {
		return fmt.Errorf("counts of model %+v cannot be added to those of %+v", other.Model, c.Model)
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

// Tokens is how many tokens are counted.
func (c *Counts) Tokens() int64 { return c.tokens }

// Dropped is how many tokens are no longer counted because of the bound, and the most that the occurrences of one token id
// can be short by.
func (c *Counts) Dropped() (tokens, undercount int64) { return c.dropped, c.undercount }

// Occurrences is how often a token id is counted.
func (c *Counts) Occurrences(token int32) uint32 { return c.occurrences[token] }

// Bigrams are the counted pairs of tokens; nil where none are.
func (c *Counts) Bigrams() *Bigrams { return c.bigrams }

// Each calls f with every pair of a MoE layer (counted from 0) and how often it occurred, ordered by token and expert.
func (c *Counts) Each(layer int, f func(token int32, expert uint16, n uint32)) {
	all := c.layers[layer].merged()
	for i, p := range all.pairs {
		f(p.token(), p.expert(), all.counts[i])
	}
}

// Distinct is the number of different token ids.
func (c *Counts) Distinct() int {
	n := 0
	for _, occurrences := range c.occurrences {
		if occurrences > 0 {
			n++
		}
	}
	return n
}

// Skew is the load of a layer's busiest expert over the mean, averaged over layers.
func (c *Counts) Skew() float64 {
	mean := float64(c.tokens) * float64(c.Model.ExpertsPerToken) / float64(c.Model.Experts)
	sum := 0.0
	loads := make([]int64, c.Model.Experts)
	for layer := range c.layers {
		clear(loads)
		c.Each(layer, func(_ int32, expert uint16, n uint32) { loads[expert] += int64(n) })
		sum += float64(slices.Max(loads)) / mean
	}
	return sum / float64(len(c.layers))
}
