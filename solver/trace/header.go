// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strconv"
)

// Limits of a trace: far above any known model, and low enough that no product of them overflows.
const (
	maxHeaderBytes = 16 << 20
	maxExperts     = 1 << 16
	maxVocabulary  = 1 << 20 // known vocabularies have up to 262,144 ids
	maxLayers      = 1 << 12
	maxHidden      = 1 << 20
	maxDomains     = 1 << 8
)

// MaxTokenLayers is the maximum of vocabulary size times MoE layers: counts and tables have about 12 bytes per token id
// and layer, for unseen token ids too. The largest known model has 14 million.
const MaxTokenLayers = 1 << 25

// Limits on the counts, of 4 bytes each, that solving allocates for a trace (see counts). A trace may use minCounts,
// which is enough for every known model with few requests, plus activationCounts per activation. Requests of 7 tokens
// stay below activationCounts in the sparsest known model (10 of 512 experts).
const (
	minCounts        = 96 << 20
	activationCounts = 8
	// boundCounts is the number of counts per pair of experts in the bounds of an evaluation: five float64 matrices for
	// each of two layers at a time.
	boundCounts = 20
)

// counts returns the number of 4-byte counts that solving allocates for the given number of requests, independent of
// their content: by token id and layer (three in a table of scores), by pair of experts (two numbers in a layer, one
// between layers, and boundCounts), and by request and expert.
func (m *Model) counts(requests int) int {
	return boundCounts*m.Experts*m.Experts + len(m.Layers)*(3*m.Vocabulary+3*m.Experts*m.Experts+requests*m.Experts)
}

// tensor is one entry of the safetensors header; begin and end are byte offsets after the header.
type tensor struct {
	name       string
	dtype      string
	shape      []int64
	begin, end int64
}

func (t tensor) elements() int64 {
	n := int64(1)
	for _, d := range t.shape {
		n *= d
	}
	return n
}

var dtypeBytes = map[string]uint64{
	"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
	"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}

// parseHeader returns the tensors, in the order of their data, and the metadata.
func parseHeader(text []byte) ([]tensor, map[string]string, error) {
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(text, &entries); err != nil {
		return nil, nil, invalidf("header is not a JSON object: %v", err)
	}
	metadata := map[string]string{}
	var tensors []tensor
	for name, entry := range entries {
		if name == "__metadata__" {
			if err := json.Unmarshal(entry, &metadata); err != nil {
				return nil, nil, invalidf("__metadata__ is not a map of strings: %v", err)
			}
			continue
		}
		t, err := parseTensor(name, entry)
		if err != nil {
			return nil, nil, err
		}
		tensors = append(tensors, t)
	}
	slices.SortFunc(tensors, func(a, b tensor) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end), cmp.Compare(a.name, b.name))
	})
	end := int64(0)
	for _, t := range tensors {
		if t.begin != end {
			return nil, nil, invalidf("tensor %q begins at byte %d; the data before it ends at %d", t.name, t.begin, end)
		}
		end = t.end
	}
	return tensors, metadata, nil
}

func parseTensor(name string, entry json.RawMessage) (tensor, error) {
	var fields struct {
		DType   string  `json:"dtype"`
		Shape   []int64 `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	if err := json.Unmarshal(entry, &fields); err != nil {
		return tensor{}, invalidf("tensor %q: %v", name, err)
	}
	width, known := dtypeBytes[fields.DType]
	if !known {
		return tensor{}, invalidf("tensor %q: unknown dtype %q", name, fields.DType)
	}
	if len(fields.Offsets) != 2 || fields.Offsets[0] < 0 || fields.Offsets[1] < fields.Offsets[0] {
		return tensor{}, invalidf("tensor %q: data_offsets %v are not an ascending pair", name, fields.Offsets)
	}
	t := tensor{name: name, dtype: fields.DType, shape: fields.Shape, begin: fields.Offsets[0], end: fields.Offsets[1]}
	size := width
	for _, d := range t.shape {
		high, low := bits.Mul64(size, uint64(d))
		if d < 0 || high != 0 || low > math.MaxInt64 {
			return tensor{}, invalidf("tensor %q: shape %v is negative or too large", name, t.shape)
		}
		size = low
	}
	if int64(size) != t.end-t.begin {
		return tensor{}, invalidf("tensor %q: shape %v of %s needs %d bytes, data_offsets hold %d", name, t.shape, t.dtype, size, t.end-t.begin)
	}
	return t, nil
}

// tensorSpec is the format of one tensor.
type tensorSpec struct {
	dtypes   []string
	rank     int
	optional bool
}

// The two tensors of a look-ahead; a trace has both or neither.
const (
	lookAheadExperts = "lookahead_experts"
	lookAheadScores  = "lookahead_scores"
)

var specs = map[string]tensorSpec{
	"input_ids":        {dtypes: []string{"U16", "I32"}, rank: 1},
	"request_offsets":  {dtypes: []string{"I64"}, rank: 1},
	"request_document": {dtypes: []string{"I32"}, rank: 1},
	"request_domain":   {dtypes: []string{"U8"}, rank: 1, optional: true},
	"routed_experts":   {dtypes: []string{"U8", "U16"}, rank: 3},
	lookAheadExperts:   {dtypes: []string{"U8", "U16"}, rank: 3, optional: true},
	lookAheadScores:    {dtypes: []string{"U16"}, rank: 3, optional: true},
}

func checkTensors(tensors []tensor) error {
	found := map[string]bool{}
	for _, t := range tensors {
		spec, known := specs[t.name]
		if !known {
			continue
		}
		found[t.name] = true
		if !slices.Contains(spec.dtypes, t.dtype) {
			return invalidf("tensor %q has dtype %s; allowed is %v", t.name, t.dtype, spec.dtypes)
		}
		if len(t.shape) != spec.rank {
			return invalidf("tensor %q has shape %v; it must have %d dimensions", t.name, t.shape, spec.rank)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		if !found[name] && !specs[name].optional {
			return invalidf("tensor %q is missing: not a routing trace", name)
		}
	}
	if found[lookAheadExperts] != found[lookAheadScores] {
		return invalidf("tensors %q and %q must both be present or both be absent", lookAheadExperts, lookAheadScores)
	}
	return nil
}

// parseModel reads the metadata; shape is the shape of routed_experts.
func parseModel(metadata map[string]string, shape []int64) (Model, error) {
	m := Model{Type: metadata["model_type"], Config: metadata["model_config"], Digest: metadata["model_digest"]}
	numbers := map[string]int{}
	for _, key := range []string{"num_experts", "num_experts_per_tok", "num_moe_layers", "vocab_size"} {
		text, ok := metadata[key]
		if !ok {
			return m, invalidf("__metadata__: %s is missing", key)
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return m, invalidf("__metadata__: %s is %q; it must be a positive number", key, text)
		}
		numbers[key] = n
	}
	m.Experts, m.TopK, m.Vocabulary = numbers["num_experts"], numbers["num_experts_per_tok"], numbers["vocab_size"]
	if layers := numbers["num_moe_layers"]; int64(layers) != shape[1] || int64(m.TopK) != shape[2] {
		return m, invalidf("routed_experts has shape %v; num_moe_layers %d and num_experts_per_tok %d need [tokens, %d, %d]", shape, layers, m.TopK, layers, m.TopK)
	}
	if shape[1] > maxLayers {
		return m, invalidf("num_moe_layers is %d; allowed is 1 to %d", shape[1], maxLayers)
	}
	if text := metadata["domains"]; text != "" {
		if err := json.Unmarshal([]byte(text), &m.Domains); err != nil {
			return m, invalidf("__metadata__: domains is not a JSON list of strings: %v", err)
		}
		if len(m.Domains) > maxDomains {
			return m, invalidf("__metadata__: domains has %d entries; the type U8 of request_domain allows %d", len(m.Domains), maxDomains)
		}
	}
	if err := m.placeLayers(metadata["moe_layers"], int(shape[1])); err != nil {
		return m, err
	}
	return m, m.validate()
}

// layerConfig is the part of a checkpoint's config.json that distinguishes dense layers from MoE layers.
type layerConfig struct {
	HiddenLayers int              `json:"num_hidden_layers"`
	HiddenSize   int              `json:"hidden_size"`
	FirstDense   *int             `json:"first_k_dense_replace"`
	Frequency    *json.RawMessage `json:"moe_layer_freq"`
	DenseOnly    []int            `json:"mlp_only_layers"`
	SparseStep   *int             `json:"decoder_sparse_step"`
}

// placeLayers sets Layers, HiddenLayers and HiddenSize from the list in the metadata or from the model's config (see
// TextConfig).
func (m *Model) placeLayers(list string, count int) error {
	var config layerConfig
	if m.Config != "" {
		if err := json.Unmarshal([]byte(m.TextConfig()), &config); err != nil {
			return invalidf("__metadata__: model_config is not the JSON of a model configuration: %v", err)
		}
	}
	m.HiddenLayers, m.HiddenSize = config.HiddenLayers, config.HiddenSize
	if m.HiddenLayers < 0 || m.HiddenLayers > maxLayers {
		return invalidf("model_config: num_hidden_layers is %d; allowed is 1 to %d", m.HiddenLayers, maxLayers)
	}
	if list != "" {
		if err := json.Unmarshal([]byte(list), &m.Layers); err != nil {
			return invalidf("__metadata__: moe_layers is not a JSON list of numbers: %v", err)
		}
		if len(m.Layers) != count {
			return invalidf("__metadata__: moe_layers lists %d layers; num_moe_layers is %d", len(m.Layers), count)
		}
		if m.HiddenLayers == 0 {
			m.HiddenLayers = slices.Max(m.Layers) + 1
		}
		return nil
	}
	if m.HiddenLayers == 0 {
		m.HiddenLayers = count
	}
	if config.describesLayers() {
		layers, err := config.moeLayers()
		if err != nil {
			return err
		}
		if len(layers) != count {
			return invalidf("model_config describes %d MoE layers %v; num_moe_layers is %d: list them in moe_layers", len(layers), layers, count)
		}
		m.Layers = layers
		return nil
	}
	if count > m.HiddenLayers {
		return invalidf("num_moe_layers is %d; model_config has %d layers in all", count, m.HiddenLayers)
	}
	for layer := m.HiddenLayers - count; layer < m.HiddenLayers; layer++ {
		m.Layers = append(m.Layers, layer)
	}
	return nil
}

func (c *layerConfig) describesLayers() bool {
	return c.HiddenLayers > 0 && (c.FirstDense != nil || c.Frequency != nil || c.SparseStep != nil || len(c.DenseOnly) > 0)
}

// moeLayers applies the rules of the DeepSeek family (first_k_dense_replace, moe_layer_freq: a step, or one flag per
// layer) and of the Qwen family (decoder_sparse_step, mlp_only_layers).
func (c *layerConfig) moeLayers() ([]int, error) {
	step := 1
	var flags []int
	if c.Frequency != nil && json.Unmarshal(*c.Frequency, &step) != nil {
		if err := json.Unmarshal(*c.Frequency, &flags); err != nil || len(flags) != c.HiddenLayers {
			return nil, invalidf("model_config: moe_layer_freq is %s; it must be a number, or one 0 or 1 for each of %d layers", *c.Frequency, c.HiddenLayers)
		}
	}
	sparse := 1
	if c.SparseStep != nil {
		sparse = *c.SparseStep
	}
	if len(c.DenseOnly) > maxLayers {
		return nil, invalidf("model_config: mlp_only_layers lists %d layers; allowed are up to %d", len(c.DenseOnly), maxLayers)
	}
	if step < 1 || sparse < 1 {
		return nil, invalidf("model_config: moe_layer_freq %d and decoder_sparse_step %d must be at least 1", step, sparse)
	}
	var layers []int
	for i := range c.HiddenLayers {
		dense := c.FirstDense != nil && i < *c.FirstDense ||
			flags != nil && flags[i] == 0 || i%step != 0 || (i+1)%sparse != 0 || slices.Contains(c.DenseOnly, i)
		if !dense {
			layers = append(layers, i)
		}
	}
	return layers, nil
}
