// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/model/family"
	"github.com/semmoe/operator/solver/modelconfig"
)

// maxLayers is the maximum of num_hidden_layers. A corrupt config can neither exhaust memory nor make a report too
// long.
const maxLayers = 512

// Config contains the fields of a model's config.json that the operator uses, regardless of their spelling in the file.
type Config struct {
	// ModelType is model_type of the language model.
	ModelType string
	// LayoutAs is the known model type whose layout the checkpoint has, as the user states. It is empty if the layout is
	// that of ModelType.
	LayoutAs string
	// Wrapper is the model_type of the outermost multimodal wrapper, which determines the code that engines run. It is
	// empty for a model without wrapper.
	Wrapper string
	// Layers is the number of hidden layers, including dense ones.
	Layers int
	// MoELayers lists the model layer indices of the layers with routed experts, in ascending order.
	MoELayers []int
	// Experts is the number of routed experts of an MoE layer. ExpertsPerToken is the number of them that a token
	// activates. ZeroExperts is the number of further rows of the gate, for experts without weights.
	Experts, ExpertsPerToken, ZeroExperts int
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
	// layersFound reports that config.json contains no layer rule, and that the layers with tensors of experts are the
	// MoE layers.
	layersFound bool
	// layout is the family with the layout of the checkpoint. It is nil for the first layout of the family.
	layout *family.Family
	// prefix is the prefix of the list of layers, if it is none of the known ones.
	prefix string
}

// rawConfig contains the fields of config.json that describe an MoE model, in all spellings of known families. Pointers
// distinguish absent fields from zero.
type rawConfig struct {
	ModelType      string          `json:"model_type"`
	Layers         *int            `json:"num_hidden_layers"`
	DecoderLayers  *int            `json:"num_layers"` // LongCat
	HiddenSize     *int            `json:"hidden_size"`
	VocabSize      *int            `json:"vocab_size"`
	DType          string          `json:"dtype"`
	TorchDType     string          `json:"torch_dtype"`
	Quantization   json.RawMessage `json:"quantization_config"`
	TiedEmbeddings bool            `json:"tie_word_embeddings"`
	ZeroExperts    *int            `json:"zero_expert_num"` // LongCat
	expertCounts
	layerRule
}

// expertCounts are the spellings of the number of experts, of experts per token, and of groups.
type expertCounts struct {
	NumLocalExperts    *uniform `json:"num_local_experts"`
	NumExperts         *uniform `json:"num_experts"`
	RoutedExperts      *uniform `json:"n_routed_experts"`
	MoENumExperts      *uniform `json:"moe_num_experts"` // ERNIE, Step
	ExpertsPerToken    *uniform `json:"num_experts_per_tok"`
	ExpertsPerTokenAll *uniform `json:"num_experts_per_token"` // Kimi Linear
	MoETopK            *uniform `json:"moe_topk"`              // Hunyuan, LongCat
	MoETopK2           *uniform `json:"moe_top_k"`             // Step
	MoEK               *uniform `json:"moe_k"`                 // ERNIE
	TopKExperts        *uniform `json:"top_k_experts"`         // Gemma
	Groups             *int     `json:"n_group"`
	ExpertGroups       *int     `json:"num_expert_group"` // Kimi Linear
	GroupsPerToken     *int     `json:"topk_group"`
}

// uniform is a number, or a list with the same number for each layer.
type uniform int

// UnmarshalJSON returns an error for a list of different numbers.
func (u *uniform) UnmarshalJSON(text []byte) error {
	var list []int
	if json.Unmarshal(text, &list) != nil {
		return json.Unmarshal(text, (*int)(u))
	}
	if len(list) == 0 || slices.Min(list) != slices.Max(list) {
		return fmt.Errorf("a list of different numbers (%.100s): layers with different numbers of experts are not supported", text)
	}
	*u = uniform(list[0])
	return nil
}

func (c expertCounts) experts() *int {
	return (*int)(cmp.Or(c.NumLocalExperts, c.NumExperts, c.RoutedExperts, c.MoENumExperts))
}

func (c expertCounts) perToken() *int {
	return (*int)(cmp.Or(c.ExpertsPerToken, c.ExpertsPerTokenAll, c.MoETopK, c.MoETopK2, c.MoEK, c.TopKExperts))
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

// ParseConfig parses the config.json of a model of a known family. Errors are *InvalidError. An error for which the
// model can be served nevertheless wraps *NoPlanError.
func ParseConfig(text []byte) (*Config, error) { return parseConfig(text, "") }

// parseConfig parses a config.json. layoutAs is the model type whose layout the checkpoint has; it is empty if that is
// the model's own type.
func parseConfig(text []byte, layoutAs string) (*Config, error) {
	text = modelconfig.Strict(text)
	var raw rawConfig
	if err := json.Unmarshal(exactMembers(text), &raw); err != nil {
		// A field of an unknown model type, or of a later release, may have any form.
		var members map[string]json.RawMessage
		if json.Unmarshal(text, &members) != nil {
			return nil, Invalidf("not a valid model config: %v", err)
		}
		_ = json.Unmarshal(members["model_type"], &raw.ModelType)
		state := "is not a known MoE family"
		if family.Lookup(raw.ModelType) != nil {
			state = "has a config of an unknown form"
		}
		return nil, &NoPlanError{raw.ModelType, fmt.Sprintf("model_type %.*q %s: %v", maxWrapper, raw.ModelType, state, err)}
	}
	name, wrapped := modelconfig.Inner(text)
	described := family.Lookup(raw.ModelType) != nil || layoutAs != "" && raw.experts() != nil
	if !described && wrapped != nil {
		// A multimodal wrapper: its model_type names the wrapper, and the config of the language model is inside.
		inner, err := parseConfig(wrapped, layoutAs)
		if noPlan, ok := errors.AsType[*NoPlanError](err); ok {
			return nil, &NoPlanError{cmp.Or(raw.ModelType, noPlan.ModelType), fmt.Sprintf("%s: %s", name, noPlan.Reason)}
		}
		if err != nil {
			return nil, Invalidf("%s: %v", name, err)
		}
		if inner.DType == "" {
			inner.DType = cmp.Or(raw.DType, raw.TorchDType)
		}
		inner.TiedEmbeddings = inner.TiedEmbeddings || raw.TiedEmbeddings
		inner.Wrapper = cmp.Or(raw.ModelType, inner.Wrapper)
		if len(inner.Wrapper) > maxWrapper {
			return nil, &NoPlanError{raw.ModelType, fmt.Sprintf("model_type %.*q… is longer than %d bytes", maxWrapper, inner.Wrapper, maxWrapper)}
		}
		inner.Quantization = cmp.Or(inner.Quantization, quantizationOf(raw.Quantization))
		return inner, nil
	}
	config, err := raw.config(text, layoutAs)
	if invalid, ok := errors.AsType[*InvalidError](err); ok {
		return nil, &NoPlanError{raw.ModelType, invalid.Error()} // engines may have a default for a missing field
	}
	return config, err
}

// exactMembers returns a config without members whose names have other characters than those of the fields. Engines
// distinguish n_group from N_Group, and package json does not.
func exactMembers(text []byte) []byte {
	var members map[string]json.RawMessage
	if json.Unmarshal(text, &members) != nil {
		return text
	}
	maps.DeleteFunc(members, func(name string, _ json.RawMessage) bool {
		return strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != ""
	})
	exact, err := json.Marshal(members)
	if err != nil {
		return text
	}
	return exact
}

func (r rawConfig) config(text []byte, layoutAs string) (*Config, error) {
	known := family.Lookup(cmp.Or(layoutAs, r.ModelType))
	if known == nil {
		return nil, &NoPlanError{r.ModelType, fmt.Sprintf("model_type %.*q is not a known MoE family", maxWrapper, r.ModelType)}
	}
	experts := r.experts()
	if experts == nil {
		return nil, &NoPlanError{r.ModelType, fmt.Sprintf("model_type %s: no field of the config contains the number of experts (num_local_experts, num_experts, n_routed_experts or moe_num_experts)", r.ModelType)}
	}
	c := &Config{
		ModelType: r.ModelType, LayoutAs: layoutAs, Experts: *experts, ZeroExperts: orElse(r.ZeroExperts, 0),
		Groups:         max(orElse(cmp.Or(r.Groups, r.ExpertGroups), known.Groups), 1),
		GroupsPerToken: max(orElse(r.GroupsPerToken, known.GroupsPerToken), 1),
		DType:          cmp.Or(r.DType, r.TorchDType), Quantization: quantizationOf(r.Quantization),
		TiedEmbeddings: r.TiedEmbeddings, Text: text,
	}
	for _, field := range []struct {
		name  string
		value *int
		bound int
		into  *int
	}{
		{"num_hidden_layers", cmp.Or(r.Layers, r.DecoderLayers, r.listedLayers()), maxLayers, &c.Layers},
		{"hidden_size", r.HiddenSize, 1 << 20, &c.HiddenSize},
		{"vocab_size", r.VocabSize, 1 << 24, &c.VocabSize},
		{"num_experts_per_tok", r.perToken(), c.Experts, &c.ExpertsPerToken},
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
	if c.ZeroExperts < 0 || c.ZeroExperts > 1<<16 {
		return nil, Invalidf("zero_expert_num is %d; allowed is 0 to %d", c.ZeroExperts, 1<<16)
	}
	if err := c.checkGroups(); err != nil {
		return nil, err
	}
	var err error
	if c.MoELayers, err = r.moeLayers(c.Layers, known); err != nil {
		return nil, err
	}
	c.layersFound = layoutAs != "" && !r.describesLayers()
	if len(c.MoELayers) == 0 {
		return nil, &NoPlanError{r.ModelType, fmt.Sprintf("not an MoE model: its config declares all %d layers dense", c.Layers)}
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
