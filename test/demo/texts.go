// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/semmoe/operator/test/corpus"
)

// texts holds the prompts and requests that the demo sends.
type texts struct {
	// golden holds prompts with reference answers.
	golden []goldenCase
	// train holds requests to profile, heldOut requests to measure, from other documents of the same kinds.
	train, heldOut []corpus.Request
}

// readTexts reads texts from the repository and from the Go distribution of this machine.
func readTexts(ctx context.Context, goldenFile string) (t texts, err error) {
	if t.golden, err = loadGolden(goldenFile); err != nil {
		return t, err
	}
	t.train, t.heldOut, err = corpus.Halves(ctx)
	return t, err
}

// prose lists the natural-language kinds of text in the corpus. All other kinds are program code and data formats.
var prose = []string{"chinese", "english", "french", "german", "japanese", "russian", "spanish"}

// ofProse returns the prose requests if wanted is true, and all others if wanted is false.
func ofProse(requests []corpus.Request, wanted bool) []corpus.Request {
	return slices.DeleteFunc(slices.Clone(requests), func(r corpus.Request) bool { return slices.Contains(prose, r.Kind) != wanted })
}

// applyDataset creates a ConfigMap with requests to profile.
func (d *demo) applyDataset(ctx context.Context, name string, requests []corpus.Request) error {
	lines, err := corpus.JSONL(requests)
	if err != nil {
		return err
	}
	return d.out.Step(ctx, fmt.Sprintf("data set of %d requests", len(requests)), func(func(string)) error {
		return d.apply(ctx, map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": namespace}}, map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"namespace": namespace, "name": name}, "data": map[string]string{"dataset.jsonl": string(lines)},
		})
	})
}
