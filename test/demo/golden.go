package main

import (
	"encoding/json"
	"fmt"
	"os"
)

// checkpointDir is the small real model that ships with the project: 4 layers of 32 experts, top-4.
const checkpointDir = "internal/refengine/testdata/tiny-qwen3moe"

// flipMargin is the margin of a greedy token below which rounding may choose another: what follows is not compared.
const flipMargin = 1e-3

// goldenCase is what an independent implementation computed for a prompt.
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

// comparable is how many of the greedy tokens rounding cannot have changed.
func (g goldenCase) comparable() int {
	for i, margin := range g.GreedyMargin {
		if margin < flipMargin {
			return i
		}
	}
	return len(g.GreedyIDs)
}

// agree is how many leading tokens are the golden ones, among those that can be compared.
func (g goldenCase) agree(ids []int) int {
	limit := min(g.comparable(), len(ids))
	for i := range limit {
		if ids[i] != g.GreedyIDs[i] {
			return i
		}
	}
	return limit
}
