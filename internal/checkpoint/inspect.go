package checkpoint

import (
	"cmp"
	"encoding/json"
	"path/filepath"
	"strings"
)

// Report is what inspection tells about a model. As JSON it fits a Kubernetes termination message (4096 bytes)
// whatever the model: its longest part lists at most 512 layer indices.
type Report struct {
	// Family is the model type, such as qwen3_moe.
	Family string `json:"family"`
	// Wrapper is the model type of the multimodal wrapper around it, such as qwen3_vl_moe; empty where there is none.
	Wrapper string `json:"wrapper,omitempty"`
	// Layers counts all hidden layers; MoELayers lists the model indices of those with routed experts.
	Layers    int   `json:"layers"`
	MoELayers []int `json:"moeLayers"`
	// Experts is the number of routed experts of an MoE layer, ExpertsPerToken how many of them a token activates.
	Experts         int `json:"experts"`
	ExpertsPerToken int `json:"expertsPerToken"`
	// Groups and GroupsPerToken describe group-limited gates; both are 1 elsewhere.
	Groups         int `json:"groups"`
	GroupsPerToken int `json:"groupsPerToken"`
	Hidden         int `json:"hidden"`
	Vocab          int `json:"vocab"`
	// DType is as config.json spells it.
	DType string `json:"dtype,omitempty"`
	// Quantization is how the weights are quantised, such as fp8 or modelopt/NVFP4; empty where the checkpoint says nothing.
	Quantization string `json:"quantization,omitempty"`
	// Shards counts the weight files, Bytes is their total size.
	Shards int   `json:"shards"`
	Bytes  int64 `json:"bytes"`
	// ModelDigest identifies the model, see Checkpoint.Digest.
	ModelDigest string `json:"modelDigest"`
	// TiedEmbeddings is true where config.json ties the output projection to the embeddings and no tensor holds the projection.
	TiedEmbeddings bool `json:"tiedEmbeddings,omitempty"`
	// Unpermutable is why the experts cannot be put into another order; empty where they can, and in what releases before have reported.
	Unpermutable string `json:"unpermutable,omitempty"`
}

// maxUnpermutable bounds a text as it is in JSON, so that a report stays short.
const maxUnpermutable = 448

// Inspect opens the checkpoint in dir, validates it without loading weights, and describes it.
func Inspect(dir string) (Report, error) {
	c, err := open(dir, false)
	if err != nil {
		return Report{}, err
	}
	defer c.Close()
	quantized, err := c.quantization()
	if err != nil {
		return Report{}, err
	}
	return Report{
		Family:          c.Config.ModelType,
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
		Unpermutable:    c.unpermutable(),
	}, nil
}

// tiedEmbeddings reports whether an engine has to use the embeddings as the output projection: a tensor lm_head.weight, with or
// without the prefix of a multimodal wrapper, takes precedence over tie_word_embeddings.
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

// unpermutable is why the experts cannot be permuted, with files named as in the checkpoint; empty where they can. The model can be served all
// the same.
func (c *Checkpoint) unpermutable() string {
	err := c.CheckPermutable()
	if err == nil {
		return ""
	}
	text := strings.TrimPrefix(err.Error(), filepath.Clean(c.Dir)+"/")
	text = text[:min(len(text), maxUnpermutable)]
	for {
		text = strings.ToValidUTF8(text, "")
		if encoded, err := json.Marshal(text); err != nil || len(encoded) <= maxUnpermutable {
			return text
		}
		text = text[:len(text)-1]
	}
}

// quantization is what config.json says, or, where it says nothing, the file that ModelOpt puts beside it.
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

// CheckExpertParallelSize requires that the routed experts can be spread evenly over size ranks. The error lists the
// sizes that would do.
func (r Report) CheckExpertParallelSize(size int) error {
	return checkExpertParallelSize(r.Experts, size)
}
