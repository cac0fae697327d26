// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"crypto/sha256"
	"errors"
	"fmt"
)

// InvalidError reports an invalid trace; reading it again cannot help.
type InvalidError struct{ message string }

func (e *InvalidError) Error() string { return e.message }

func invalidf(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}

// IsInvalid reports whether an error in err's tree is an *InvalidError.
func IsInvalid(err error) bool {
	var invalid *InvalidError
	return errors.As(err, &invalid)
}

// Model describes the model that a trace was recorded from.
type Model struct {
	// Type is the checkpoint's model_type; it may be empty.
	Type string
	// Experts is the number of routed experts per layer, TopK the number that a token activates.
	Experts, TopK int
	// Vocabulary is the number of token ids.
	Vocabulary int
	// Layers contains the model's layer index of each MoE layer, ascending.
	Layers []int
	// HiddenLayers is the number of the model's layers, including dense layers.
	HiddenLayers int
	// HiddenSize is the width of the residual stream; 0 if the trace does not contain it.
	HiddenSize int
	// Config is the model's config.json as text; it may be empty. TextConfig returns the part that describes the
	// layers.
	Config string
	// Digest identifies the checkpoint; it may be empty.
	Digest string
	// Domains contains the names of the values of Trace.Domains; it may be empty.
	Domains []string
}

// Trace is a set of requests with the experts that their tokens activated.
type Trace struct {
	Model Model
	// Tokens are token ids, request by request [T].
	Tokens []int32
	// Offsets are the bounds of the requests in Tokens [R+1].
	Offsets []int64
	// Documents is the document that each request was cut from [R].
	Documents []int32
	// Domains is the kind of text of each request [R], or nil.
	Domains []uint8
	// Experts are expert ids [T, MoE layers, TopK], sorted by gate weight within a token and layer.
	Experts []uint16
	// LookAhead contains the predictions of each layer's gate before the layer's attention has run, or nil.
	LookAhead *LookAhead
	// Digest is the sha256 of the uncompressed file that the trace was read from.
	Digest [sha256.Size]byte
}

// Requests returns the number of requests.
func (t *Trace) Requests() int { return len(t.Offsets) - 1 }

// Length returns the number of tokens of a request.
func (t *Trace) Length(request int) int { return int(t.Offsets[request+1] - t.Offsets[request]) }

// Request returns the token ids of a request.
func (t *Trace) Request(request int) []int32 {
	return t.Tokens[t.Offsets[request]:t.Offsets[request+1]]
}

// Row returns the experts that the token at a position of Tokens activated in the MoE layer with the given index.
func (t *Trace) Row(position, layer int) []uint16 {
	k := t.Model.TopK
	begin := (position*len(t.Model.Layers) + layer) * k
	return t.Experts[begin : begin+k : begin+k]
}

// AllRequests returns the indices of all requests.
func (t *Trace) AllRequests() []int {
	all := make([]int, t.Requests())
	for r := range all {
		all[r] = r
	}
	return all
}

// TokenCount returns the number of tokens of the listed requests.
func (t *Trace) TokenCount(requests []int) int {
	n := 0
	for _, r := range requests {
		n += t.Length(r)
	}
	return n
}

// Subset copies the listed requests, in the given order, into a new trace.
func (t *Trace) Subset(requests []int) *Trace {
	tokens := t.TokenCount(requests)
	width := len(t.Model.Layers) * t.Model.TopK
	s := &Trace{
		Model:     t.Model,
		Tokens:    make([]int32, 0, tokens),
		Offsets:   make([]int64, 1, len(requests)+1),
		Documents: make([]int32, 0, len(requests)),
		Experts:   make([]uint16, 0, tokens*width),
	}
	if t.LookAhead != nil {
		s.LookAhead = &LookAhead{Width: t.LookAhead.Width}
	}
	for _, r := range requests {
		begin, end := int(t.Offsets[r]), int(t.Offsets[r+1])
		s.Tokens = append(s.Tokens, t.Tokens[begin:end]...)
		s.Experts = append(s.Experts, t.Experts[begin*width:end*width]...)
		if t.LookAhead != nil {
			s.LookAhead.appendPositions(t.LookAhead, begin, end, len(t.Model.Layers))
		}
		s.Offsets = append(s.Offsets, int64(len(s.Tokens)))
		s.Documents = append(s.Documents, t.Documents[r])
		if t.Domains != nil {
			s.Domains = append(s.Domains, t.Domains[r])
		}
	}
	return s
}

// Validate checks the invariants that Read guarantees; Write refuses a trace that violates them.
func (t *Trace) Validate() error {
	if err := t.Model.validate(); err != nil {
		return err
	}
	if err := t.validateRequests(); err != nil {
		return err
	}
	for i, id := range t.Tokens {
		if id < 0 || int(id) >= t.Model.Vocabulary {
			return invalidf("input_ids: token %d has id %d; the vocabulary allows 0 to %d", i, id, t.Model.Vocabulary-1)
		}
	}
	if err := t.validateExperts(); err != nil || t.LookAhead == nil {
		return err
	}
	return t.LookAhead.validate(t)
}

func (m *Model) validate() error {
	switch {
	case m.Experts < 1 || m.Experts > maxExperts:
		return invalidf("num_experts is %d; allowed is 1 to %d", m.Experts, maxExperts)
	case m.TopK < 1 || m.TopK > m.Experts:
		return invalidf("num_experts_per_tok is %d; allowed is 1 to num_experts, %d", m.TopK, m.Experts)
	case m.Vocabulary < 1 || m.Vocabulary > maxVocabulary:
		return invalidf("vocab_size is %d; allowed is 1 to %d", m.Vocabulary, maxVocabulary)
	case len(m.Layers) < 1 || m.HiddenLayers > maxLayers:
		return invalidf("%d MoE layers of %d layers; allowed is 1 to %d", len(m.Layers), m.HiddenLayers, maxLayers)
	case m.Vocabulary*len(m.Layers) > MaxTokenLayers:
		return invalidf("vocab_size is %d for %d MoE layers; allowed is up to %d token ids in all layers", m.Vocabulary, len(m.Layers), MaxTokenLayers)
	case m.HiddenSize < 0 || m.HiddenSize > maxHidden:
		return invalidf("model_config: hidden_size is %d; allowed is 1 to %d", m.HiddenSize, maxHidden)
	}
	for i, layer := range m.Layers {
		if layer < 0 || layer >= m.HiddenLayers || i > 0 && layer <= m.Layers[i-1] {
			return invalidf("moe_layers: %v is not an ascending list of layers between 0 and %d", m.Layers, m.HiddenLayers-1)
		}
	}
	return nil
}

func (t *Trace) validateRequests() error {
	requests := len(t.Offsets) - 1
	switch {
	case requests < 1:
		return invalidf("request_offsets: the trace has no request")
	case t.Offsets[0] != 0:
		return invalidf("request_offsets: the first offset is %d; it must be 0", t.Offsets[0])
	case t.Offsets[requests] != int64(len(t.Tokens)):
		return invalidf("request_offsets: the last offset is %d; it must be the number of tokens, %d", t.Offsets[requests], len(t.Tokens))
	case len(t.Documents) != requests:
		return invalidf("request_document has %d entries for %d requests", len(t.Documents), requests)
	case t.Domains != nil && len(t.Domains) != requests:
		return invalidf("request_domain has %d entries for %d requests", len(t.Domains), requests)
	case len(t.Experts) != len(t.Tokens)*len(t.Model.Layers)*t.Model.TopK:
		return invalidf("routed_experts has %d entries; %d tokens, %d MoE layers and top-%d need %d",
			len(t.Experts), len(t.Tokens), len(t.Model.Layers), t.Model.TopK, len(t.Tokens)*len(t.Model.Layers)*t.Model.TopK)
	}
	if counts, allowed := t.Model.counts(requests), max(minCounts, activationCounts*len(t.Experts)); counts > allowed {
		return invalidf("%d requests, vocab_size %d and %d MoE layers of %d experts need %d counts; allowed are %d for %d activations: record more tokens in fewer requests",
			requests, t.Model.Vocabulary, len(t.Model.Layers), t.Model.Experts, counts, allowed, len(t.Experts))
	}
	for r := range requests {
		if t.Offsets[r+1] <= t.Offsets[r] {
			return invalidf("request_offsets: request %d goes from %d to %d; offsets must ascend and requests must have at least one token",
				r, t.Offsets[r], t.Offsets[r+1])
		}
	}
	for r, domain := range t.Domains {
		if len(t.Model.Domains) > 0 && int(domain) >= len(t.Model.Domains) {
			return invalidf("request_domain: request %d has domain %d; allowed is 0 to %d", r, domain, len(t.Model.Domains)-1)
		}
	}
	return nil
}

func (t *Trace) validateExperts() error {
	lastSeen := make([]int, t.Model.Experts)
	k, layers := t.Model.TopK, len(t.Model.Layers)
	for begin, row := 0, 1; begin < len(t.Experts); begin, row = begin+k, row+1 {
		for _, expert := range t.Experts[begin : begin+k] {
			position, layer := (row-1)/layers, t.Model.Layers[(row-1)%layers]
			if int(expert) >= t.Model.Experts {
				return invalidf("routed_experts: token %d, layer %d: expert %d; allowed is 0 to %d", position, layer, expert, t.Model.Experts-1)
			}
			if lastSeen[expert] == row {
				return invalidf("routed_experts: token %d, layer %d: expert %d appears twice", position, layer, expert)
			}
			lastSeen[expert] = row
		}
	}
	return nil
}
