// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"cmp"
	"encoding/json"
	"path/filepath"
	"strings"

	"github.com/semmoe/operator/internal/model/family"
)

// Report describes a model. Its JSON always fits a Kubernetes termination message (4096 bytes): its longest part lists
// at most 512 layer indices.
type Report struct {
	// Family is the model type, such as qwen3_moe, and UnknownFamily if the type is unknown.
	Family string `json:"family"`
	// ModelType is model_type of config.json if the family is unknown.
	ModelType string `json:"modelType,omitempty"`
	// LayoutAs is the known model type whose layout the checkpoint has, as the user states and the strict checks confirm.
	LayoutAs string `json:"layoutAs,omitempty"`
	// Wrapper is the model type of the multimodal wrapper, such as qwen3_vl_moe. It is empty if there is no wrapper.
	Wrapper string `json:"wrapper,omitempty"`
	// Layers is the number of hidden layers. MoELayers lists the model indices of the layers with routed experts.
	Layers    int   `json:"layers"`
	MoELayers []int `json:"moeLayers"`
	// Experts is the number of routed experts of an MoE layer. ExpertsPerToken is the number of them that a token
	// activates.
	Experts         int `json:"experts"`
	ExpertsPerToken int `json:"expertsPerToken"`
	// Groups and GroupsPerToken describe group-limited gates. Both are 1 for other gates.
	Groups         int `json:"groups"`
	GroupsPerToken int `json:"groupsPerToken"`
	Hidden         int `json:"hidden"`
	Vocab          int `json:"vocab"`
	// DType is the element type as spelled in config.json.
	DType string `json:"dtype,omitempty"`
	// Quantization is the quantisation method, such as fp8 or modelopt/NVFP4. It is empty if the checkpoint does not
	// state it.
	Quantization string `json:"quantization,omitempty"`
	// Shards is the number of weight files. Bytes is their total size.
	Shards int   `json:"shards"`
	Bytes  int64 `json:"bytes"`
	// ModelDigest identifies the model. See Checkpoint.Digest.
	ModelDigest string `json:"modelDigest"`
	// TiedEmbeddings reports whether config.json ties the output projection to the embeddings and the checkpoint has no
	// tensor for the projection.
	TiedEmbeddings bool `json:"tiedEmbeddings,omitempty"`
	// Unprofilable is the reason why the model cannot be profiled, so that no plan can be made for it. Unmappable is the
	// reason why it cannot be served with an expert map. Unpermutable is the reason why its experts cannot be permuted.
	// Each is empty without such a reason, and in reports of earlier releases. None prevents serving.
	Unprofilable string `json:"unprofilable,omitempty"`
	Unmappable   string `json:"unmappable,omitempty"`
	Unpermutable string `json:"unpermutable,omitempty"`
}

// UnknownFamily is the family of a model of an unknown type.
const UnknownFamily = "unknown"

// EngineFamily returns the model type that engines see: the family, also if the family is unknown.
func (r Report) EngineFamily() string { return cmp.Or(r.ModelType, r.Family) }

// maxReason is the maximum length in bytes of a JSON-encoded reason, so that a report stays short.
const maxReason = 448

// Inspect opens the checkpoint in dir, validates it without loading weights, and describes it.
func Inspect(dir string) (Report, error) { return InspectAs(dir, "") }

// InspectAs inspects a checkpoint that is laid out as a known model type. An empty layoutAs means the model's own type.
func InspectAs(dir, layoutAs string) (Report, error) {
	c, err := open(dir, layoutAs)
	if err != nil {
		return Report{}, err
	}
	defer c.Close()
	quantized, err := c.quantization()
	if err != nil {
		return Report{}, err
	}
	if c.noPlan != nil {
		return c.servedOnly(quantized), nil
	}
	known := c.Config.family()
	return Report{
		Family:          c.Config.ModelType,
		LayoutAs:        c.Config.LayoutAs,
		Wrapper:         c.Config.Wrapper,
		Layers:          c.Config.Layers,
		MoELayers:       c.Config.MoELayers,
		Experts:         c.Config.Experts,
		ExpertsPerToken: c.Config.ExpertsPerToken,
		Groups:          c.Config.Groups,
		GroupsPerToken:  c.Config.GroupsPerToken,
		Hidden:          c.Config.HiddenSize,
		Vocab:           c.Config.VocabSize,
		DType:           c.Config.DType,
		Quantization:    quantized,
		Shards:          len(c.Shards),
		Bytes:           c.Bytes(),
		ModelDigest:     c.Digest(),
		TiedEmbeddings:  c.tiedEmbeddings(),
		Unprofilable:    known.Unprofilable,
		Unmappable:      known.Unmappable,
		Unpermutable:    c.unpermutable(),
	}, nil
}

// servedOnly describes a model that is served without a plan.
func (c *Checkpoint) servedOnly(quantized string) Report {
	report := Report{
		Family: c.noPlan.ModelType, MoELayers: []int{}, Quantization: quantized, Shards: len(c.Shards), Bytes: c.Bytes(), ModelDigest: c.Digest(),
	}
	advice := ""
	if family.Lookup(report.Family) == nil {
		report.Family, report.ModelType = UnknownFamily, truncated(c.noPlan.ModelType, maxWrapper)
		if c.Config.LayoutAs == "" {
			advice = ". If its experts are laid out as those of a known model type, set spec.model.layoutAs (--layout-as)"
		}
	}
	reason := c.relative(c.noPlan, maxReason-len(advice)) + advice
	report.Unprofilable, report.Unmappable, report.Unpermutable = reason, reason, reason
	return report
}

// tiedEmbeddings reports whether an engine has to use the embeddings as the output projection: a tensor lm_head.weight,
// with or without the prefix of a multimodal wrapper, takes precedence over tie_word_embeddings.
func (c *Checkpoint) tiedEmbeddings() bool {
	if !c.Config.TiedEmbeddings {
		return false
	}
	for name := range c.shardOf {
		if name == "lm_head.weight" || strings.HasSuffix(name, ".lm_head.weight") {
			return false
		}
	}
	return true
}

// unpermutable returns the reason why the experts cannot be permuted. It is empty if they can be permuted. A model that
// cannot be permuted can still be served.
func (c *Checkpoint) unpermutable() string {
	if err := c.CheckPermutable(); err != nil {
		return c.relative(err, maxReason)
	}
	return ""
}

// relative returns the text of an error with file names relative to the checkpoint, in at most size bytes of JSON.
func (c *Checkpoint) relative(err error, size int) string {
	return truncated(strings.ReplaceAll(err.Error(), filepath.Clean(c.Dir)+"/", ""), size)
}

// truncated returns the beginning of a text whose JSON encoding has at most size bytes.
func truncated(text string, size int) string {
	text = text[:min(len(text), size)]
	for {
		text = strings.ToValidUTF8(text, "")
		if encoded, err := json.Marshal(text); err != nil || len(encoded) <= size {
			return text
		}
		text = text[:len(text)-1]
	}
}

// quantization returns the quantisation in config.json, or else the one in the file that ModelOpt writes next to it.
func (c *Checkpoint) quantization() (string, error) {
	if c.Config.Quantization != "" {
		return c.Config.Quantization, nil
	}
	var file struct {
		Producer struct {
			Name string `json:"name"`
		} `json:"producer"`
		Quantization quantization `json:"quantization"`
	}
	if _, err := c.ReadJSON("hf_quant_config.json", &file); err != nil {
		return "", err
	}
	file.Quantization.Method = cmp.Or(file.Quantization.Method, file.Producer.Name)
	return file.Quantization.String(), nil
}

// CheckExpertParallelSize requires that the routed experts can be divided evenly among size ranks. The error lists the
// allowed sizes. If the number of experts is unknown, every size is allowed.
func (r Report) CheckExpertParallelSize(size int) error {
	if r.Experts == 0 {
		return nil // unknown
	}
	return checkExpertParallelSize(r.Experts, size)
}
