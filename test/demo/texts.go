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
	// requestBytes is about how long a request is.
	requestBytes = 180
	// heldOutPercent of the documents are never profiled: they are what is measured.
	heldOutPercent = 50
	splitSeed      = 1
)

// texts are what the demo sends.
type texts struct {
	// golden are prompts to which the right answers are known.
	golden []goldenCase
	// train is what may be profiled, heldOut what is measured: requests of other documents of the same kinds.
	train, heldOut []corpus.Request
}

// readTexts reads what the repository and the Go distribution of this machine have.
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

// prose are the kinds of text of the corpus that people write for people; all others are program text and data.
var prose = []string{"chinese", "english", "french", "german", "japanese", "russian", "spanish"}

// ofProse are the requests that are prose, or those that are not.
func ofProse(requests []corpus.Request, wanted bool) []corpus.Request {
	return slices.DeleteFunc(slices.Clone(requests), func(r corpus.Request) bool { return slices.Contains(prose, r.Kind) != wanted })
}

// applyDataset gives the operator requests to profile, as a ConfigMap.
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
