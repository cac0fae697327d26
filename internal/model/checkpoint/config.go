package checkpoint

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/modelconfig"
)

// maxLayers is the maximum of num_hidden_layers. A corrupt config can neither exhaust memory nor make a report too
// long.
const maxLayers = 512

// Config contains the fields of a model's config.json that the operator uses, regardless of their spelling in the file.
type Config struct {
	// ModelType is the model family, one of Families().
	ModelType string
	// Wrapper is the model_type of the outermost multimodal wrapper, which determines the code that engines run. It is
	// empty for a model without wrapper.
	Wrapper string
	// Layers is the number of hidden layers, including dense ones.
	Layers int
	// MoELayers lists the model layer indices of the layers with routed experts, in ascending order.
	MoELayers []int
	// Experts is the number of routed experts of an MoE layer. ExpertsPerToken is the number of them that a token
	// activates.
	Experts, ExpertsPerToken int
	// Groups and GroupsPerToken describe group-limited gates (n_group, topk_group). Both are 1 for other gates.
	Groups, GroupsPerToken int
	HiddenSize, VocabSize  int
	// DType is the element type as spelled in config.json, such as bfloat16. It is empty if config.json does not set
	// it.
	DType string
	// Quantization is the quantisation method and algorithm as spelled in config.json, such as fp8, modelopt/NVFP4 or
	// compressed-tensors/nvfp4-pack-quantized. It is empty if config.json does not set it.
	Quantization string
	// TiedEmbeddings is tie_word_embeddings. The default of every known family is false.
	TiedEmbeddings bool
	// Text is the JSON object that describes the language model: config.json itself, or the object inside a multimodal
	// wrapper. Values of config.json that are not valid JSON are replaced by null (see modelconfig.Strict).
	Text json.RawMessage
}

// Families returns the supported model types, sorted.
func Families() []string { return slices.Sorted(maps.Keys(families)) }

// rawConfig contains both the old and the new spellings of transformers. Pointers distinguish absent fields from zero.
type rawConfig struct {
	ModelType       string          `json:"model_type"`
	Layers          *int            `json:"num_hidden_layers"`
	HiddenSize      *int            `json:"hidden_size"`
	VocabSize       *int            `json:"vocab_size"`
	NumExperts      *int            `json:"num_experts"`
	NumLocalExperts *int            `json:"num_local_experts"`
	RoutedExperts   *int            `json:"n_routed_experts"`
	ExpertsPerToken *int            `json:"num_experts_per_tok"`
	Groups          *int            `json:"n_group"`
	GroupsPerToken  *int            `json:"topk_group"`
	DenseFirst      *int            `json:"first_k_dense_replace"`
	MoELayerFreq    json.RawMessage `json:"moe_layer_freq"`
	DenseLayers     []int           `json:"mlp_only_layers"`
	DecoderSparse   *int            `json:"decoder_sparse_step"`
	DType           string          `json:"dtype"`
	TorchDType      string          `json:"torch_dtype"`
	Quantization    json.RawMessage `json:"quantization_config"`
	TiedEmbeddings  bool            `json:"tie_word_embeddings"`
}

// quantization is the part of quantization_config that describes the format of the weights.
type quantization struct {
	Method    string `json:"quant_method"`
	Algorithm string `json:"quant_algo"`
	// Format is the algorithm's name in compressed-tensors. Groups maps group names to groups, which may have other
	// formats.
	Format json.RawMessage `json:"format"`
	Groups json.RawMessage `json:"config_groups"`
}

// maxQuantization and maxWrapper are the maximum lengths of texts in bytes, so that a report stays short.
const maxQuantization, maxWrapper = 64, 64

// quantizationOf reads a quantization_config. It returns an empty string for an unknown structure.
func quantizationOf(text json.RawMessage) string {
	var q quantization
	if len(text) == 0 || json.Unmarshal(text, &q) != nil {
		return ""
	}
	return q.String()
}

func (q quantization) String() string {
	text := strings.Trim(q.Method+"/"+cmp.Or(q.Algorithm, q.format()), "/")
	return text[:min(len(text), maxQuantization)]
}

// format returns the name of the NVFP4 format if any group has it, because engines treat the scales of NVFP4 specially,
// and the common format if no group has it. Members of another JSON type belong to other methods and are ignored.
func (q quantization) format() string {
	var format string
	_ = json.Unmarshal(q.Format, &format)
	var groups map[string]struct{ Format string }
	_ = json.Unmarshal(q.Groups, &groups)
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		if strings.Contains(groups[name].Format, "nvfp4") {
			return groups[name].Format
		}
	}
	return format
}

// ParseConfig parses a config.json. Errors are *InvalidError.
func ParseConfig(text []byte) (*Config, error) {
	text = modelconfig.Strict(text)
	var raw rawConfig
	if err := json.Unmarshal(text, &raw); err != nil {
		return nil, Invalidf("not a valid model config: %v", err)
	}
	name, wrapped := modelconfig.Inner(text)
	if _, known := families[raw.ModelType]; !known && wrapped != nil {
		// A multimodal wrapper: its model_type names the wrapper, and the config of the language model is inside.
		inner, err := ParseConfig(wrapped)
		if err != nil {
			return nil, Invalidf("%s: %v", name, err)
		}
		if inner.DType == "" {
			inner.DType = cmp.Or(raw.DType, raw.TorchDType)
		}
		inner.TiedEmbeddings = inner.TiedEmbeddings || raw.TiedEmbeddings
		inner.Wrapper = cmp.Or(raw.ModelType, inner.Wrapper)
		if len(inner.Wrapper) > maxWrapper {
			return nil, Invalidf("model_type %.*q… is longer than %d bytes", maxWrapper, inner.Wrapper, maxWrapper)
		}
		inner.Quantization = cmp.Or(inner.Quantization, quantizationOf(raw.Quantization))
		return inner, nil
	}
	return raw.config(text)
}

func (r rawConfig) config(text []byte) (*Config, error) {
	family, ok := families[r.ModelType]
	if !ok {
		return nil, Invalidf("model_type %q is not a supported MoE family; supported: %s", r.ModelType, strings.Join(Families(), ", "))
	}
	experts := cmp.Or(r.NumLocalExperts, r.NumExperts, r.RoutedExperts)
	if experts == nil {
		return nil, Invalidf("not an MoE model: none of num_local_experts, num_experts and n_routed_experts is set")
	}
	c := &Config{
		ModelType: r.ModelType, Experts: *experts,
		Groups: orElse(r.Groups, family.groups()), GroupsPerToken: orElse(r.GroupsPerToken, family.groupsPerToken()),
		DType: cmp.Or(r.DType, r.TorchDType), Quantization: quantizationOf(r.Quantization),
		TiedEmbeddings: r.TiedEmbeddings, Text: text,
	}
	for _, field := range []struct {
		name  string
		value *int
		bound int
		into  *int
	}{
		{"num_hidden_layers", r.Layers, maxLayers, &c.Layers},
		{"hidden_size", r.HiddenSize, 1 << 20, &c.HiddenSize},
		{"vocab_size", r.VocabSize, 1 << 24, &c.VocabSize},
		{"num_experts_per_tok", r.ExpertsPerToken, c.Experts, &c.ExpertsPerToken},
		{"the number of experts", experts, 1 << 16, &c.Experts},
	} {
		if field.value == nil {
			return nil, Invalidf("%s is missing", field.name)
		}
		if *field.value < 1 || *field.value > field.bound {
			return nil, Invalidf("%s is %d; allowed is 1 to %d", field.name, *field.value, field.bound)
		}
		*field.into = *field.value
	}
	if err := c.checkGroups(); err != nil {
		return nil, err
	}
	if err := r.checkLayerRule(); err != nil {
		return nil, err
	}
	if c.MoELayers = family.moeLayers(r); len(c.MoELayers) == 0 {
		return nil, Invalidf("not an MoE model: its config declares all %d layers dense", c.Layers)
	}
	if len(c.DType) > 32 {
		return nil, Invalidf("dtype %.32q… is not an element type", c.DType)
	}
	return c, nil
}

func (c *Config) checkGroups() error {
	if c.Groups < 1 || c.Experts%c.Groups != 0 {
		return Invalidf("n_group is %d; it must divide the %d experts", c.Groups, c.Experts)
	}
	if c.GroupsPerToken < 1 || c.GroupsPerToken > c.Groups {
		return Invalidf("topk_group is %d; allowed is 1 to n_group = %d", c.GroupsPerToken, c.Groups)
	}
	return nil
}

// checkLayerRule validates the layer rules, so that the functions below neither divide by zero nor read flags of other
// layers.
func (r rawConfig) checkLayerRule() error {
	if step := orElse(r.DecoderSparse, 1); step < 1 {
		return Invalidf("decoder_sparse_step is %d; it must be at least 1", step)
	}
	step, flags, err := r.frequency()
	switch {
	case err != nil || flags != nil && len(flags) != *r.Layers:
		return Invalidf("moe_layer_freq is %.100s; it must be a number, or one 0 or 1 for each of %d layers", r.MoELayerFreq, *r.Layers)
	case step < 1:
		return Invalidf("moe_layer_freq is %d; it must be at least 1", step)
	}
	return nil
}

// frequency parses moe_layer_freq: a step, or one flag per layer. The trace package parses the same field in the same
// way. Without the field, the step is 1.
func (r rawConfig) frequency() (step int, flags []int, err error) {
	step = 1
	if len(r.MoELayerFreq) > 0 && json.Unmarshal(r.MoELayerFreq, &step) != nil {
		step, err = 1, json.Unmarshal(r.MoELayerFreq, &flags)
	}
	return step, flags, err
}

// sparseStepLayers implements the layer rule of Qwen.
func sparseStepLayers(r rawConfig) []int {
	step := orElse(r.DecoderSparse, 1)
	return layersWhere(*r.Layers, func(l int) bool { return !slices.Contains(r.DenseLayers, l) && (l+1)%step == 0 })
}

// layersAfterDense implements the layer rule of DeepSeek. It requires checkLayerRule.
func layersAfterDense(r rawConfig) []int {
	first := orElse(r.DenseFirst, 0)
	step, flags, _ := r.frequency()
	return layersWhere(*r.Layers, func(l int) bool { return l >= first && l%step == 0 && (flags == nil || flags[l] != 0) })
}

func allLayers(r rawConfig) []int {
	return layersWhere(*r.Layers, func(int) bool { return true })
}

func layersWhere(layers int, isMoE func(int) bool) []int {
	var list []int
	for l := range layers {
		if isMoE(l) {
			list = append(list, l)
		}
	}
	return list
}

// CheckExpertParallelSize requires that the routed experts can be divided evenly among size ranks. The error lists the
// allowed sizes.
func (c *Config) CheckExpertParallelSize(size int) error {
	return checkExpertParallelSize(c.Experts, size)
}

func checkExpertParallelSize(experts, size int) error {
	if size >= 1 && experts%size == 0 {
		return nil
	}
	var allowed []string
	for n := 1; n <= experts; n++ {
		if experts%n == 0 {
			allowed = append(allowed, fmt.Sprint(n))
		}
	}
	return Invalidf("expert parallel size %d does not divide the model's %d experts; allowed sizes: %s",
		size, experts, strings.Join(allowed, ", "))
}

func orElse(v *int, fallback int) int {
	if v == nil {
		return fallback
	}
	return *v
}
