// SPDX-License-Identifier: Apache-2.0

package sglang

import "strings"

// IgnoresTiedEmbeddings reports whether SGLang never fills the output projection of a model type if tie_word_embeddings
// is set and the checkpoint has no lm_head.weight. All logits are then 0, although the health check passes. Run for
// qwen3_moe with 0.5.17. Read for the other families in python/sglang/srt/models of main, 2026-08-20, where neither the
// model nor its loader reads tie_word_embeddings.
func IgnoresTiedEmbeddings(modelType string) bool { return of(modelType).IgnoresTiedEmbeddings }

// ignoresTiedEmbeddings reports whether SGLang ignores the tied embeddings of a family. A user-provided command that
// does not name SGLang may start another engine, such as the reference engine, which uses the embeddings; the result is
// then false.
func ignoresTiedEmbeddings(family string, command []string) bool {
	starts := len(command) == 0 || strings.Contains(strings.Join(command, " "), "sglang")
	return starts && IgnoresTiedEmbeddings(family)
}
