// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
)

// checkpointDir is the path of the small trained model in the repository: 4 layers of 32 experts, top-4.
const checkpointDir = "internal/refengine/testdata/tiny-qwen3moe"

// flipMargin is the margin of a greedy token below which rounding may select another token. Tokens from there on are
// not compared.
const flipMargin = 1e-3

// goldenCase is a prompt and its continuation by an independent implementation.
type goldenCase struct {
	Name         string    `json:"name"`
	Text         string    `json:"text"`
	PromptIDs    []int     `json:"prompt_ids"`
	GreedyIDs    []int     `json:"greedy_ids"`
	GreedyMargin []float64 `json:"greedy_margin"`
	GreedyText   string    `json:"greedy_text"`
}

func loadGolden(file string) ([]goldenCase, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var golden struct {
		Cases []goldenCase `json:"cases"`
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(golden.Cases) == 0 {
		return nil, fmt.Errorf("%s: no cases", file)
	}
	return golden.Cases, nil
}

// comparable returns the number of leading greedy tokens that rounding cannot change.
func (g goldenCase) comparable() int {
	for i, margin := range g.GreedyMargin {
		if margin < flipMargin {
			return i
		}
	}
	return len(g.GreedyIDs)
}

// agree returns the number of leading tokens that equal the golden tokens, among the comparable ones.
func (g goldenCase) agree(ids []int) int {
	limit := min(g.comparable(), len(ids))
	for i := range limit {
		if ids[i] != g.GreedyIDs[i] {
			return i
		}
	}
	return limit
}
