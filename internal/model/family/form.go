// SPDX-License-Identifier: Apache-2.0

package family

// QuantizedForm is a form in which checkpoints of all families are published. The suffixes follow the name of a
// projection.
type QuantizedForm struct {
	Name string
	// Separate lists the tensors of a projection of one expert.
	Separate []string
	// Fused lists the tensors of a projection of all experts of a layer. It is empty if the form has no fused tensors.
	Fused []string
}

// Forms lists the forms. Tests permute a generated checkpoint of every family in each of them.
var Forms = []QuantizedForm{
	{"plain", []string{".weight"}, []string{""}},
	{"FP8 blocks", []string{".weight", ".weight_scale_inv"}, []string{"", "_scale_inv"}},
	{"FP8 of DeepSeek-V4", []string{".weight", ".scale"}, nil},
	{"packed int4", []string{".weight_packed", ".weight_scale", ".weight_shape"}, []string{".weight_packed", ".weight_scale", ".weight_shape"}},
	{"packed NVFP4", []string{".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"}, []string{".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"}},
	{"NVFP4 of ModelOpt", []string{".weight", ".weight_scale", ".weight_scale_2", ".input_scale"}, []string{"", "_weight_scale", "_weight_scale_2", "_input_scale"}},
	{"MXFP4", nil, []string{"_blocks", "_scales"}},
	{"GPTQ", []string{".qweight", ".qzeros", ".scales", ".g_idx"}, nil},
	{"AWQ", []string{".qweight", ".qzeros", ".scales"}, nil},
	{"msModelSlim", []string{".weight", ".weight_scale", ".weight_offset"}, nil},
}
