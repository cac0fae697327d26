package sglang

import (
	"slices"
	"strings"
)

// IgnoresTiedEmbeddings lists the families, by model_type, whose output projection SGLang never fills where tie_word_embeddings is set and
// the checkpoint has no lm_head.weight. Every logit is 0 then, and the health check passes. Run for qwen3_moe with 0.5.17; read for the others
// in python/sglang/srt/models of main, 2026-08-20, where neither the model nor its loader reads tie_word_embeddings.
var IgnoresTiedEmbeddings = []string{
	"glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text",
}

// ignoresTiedEmbeddings knows the families above. Of a user's command that does not name the engine, nothing is known: the reference engine,
// which may take SGLang's place, uses the embeddings.
func ignoresTiedEmbeddings(family string, command []string) bool {
	starts := len(command) == 0 || strings.Contains(strings.Join(command, " "), "sglang")
	return starts && slices.Contains(IgnoresTiedEmbeddings, family)
}
