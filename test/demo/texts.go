// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/semmoe/operator/test/corpus"
)

const (
	// requestBytes is the approximate length of a request.
	requestBytes = 180
	// heldOutPercent of the documents are not profiled. The demo measures requests of these documents.
	heldOutPercent = 50
	splitSeed      = 1
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
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return t, fmt.Errorf("go env GOROOT: %w", err)
	}
	fromGo, err := corpus.FromGo(strings.TrimSpace(string(root)))
	if err != nil {
		return t, err
	}
	known, unknown := corpus.Split(append(corpus.Written(), fromGo...), heldOutPercent, splitSeed)
	t.train, t.heldOut = corpus.Requests(known, requestBytes), corpus.Requests(unknown, requestBytes)
	return t, nil
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
	return d.out.step(ctx, fmt.Sprintf("data set of %d requests", len(requests)), func(func(string)) error {
		return d.apply(ctx, map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": namespace}}, map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"namespace": namespace, "name": name}, "data": map[string]string{"dataset.jsonl": string(lines)},
		})
	})
}
