// SPDX-License-Identifier: Apache-2.0

package forecast_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

var update = flag.Bool("update", false, "write the golden file of the Python consumer anew")

// lookBackGolden is the expected output of the look-back in the tests of the token-shuffle consumer; arrays as in
// tables.safetensors.
type lookBackGolden struct {
	Ranks      int          `json:"ranks"`
	Depth      int          `json:"depth"`
	Vocabulary int          `json:"vocabulary"`
	Best       int          `json:"best"`
	TokenRank  []uint16     `json:"token_rank"`
	TokenScore []uint16     `json:"token_score"`
	Factor     []float32    `json:"factor"`
	RankOf     [][][]int    `json:"rank_of"` // [layers][experts]
	Tokens     []int32      `json:"tokens"`
	Experts    [][][]uint16 `json:"experts"` // [tokens][layers][top-k]
	Scores     [][][]int    `json:"scores"`  // [layers][tokens][ranks], shares times affinity.ScoreScale
}

// TestLookBackGolden compares the golden file of the Python consumer's tests with the output of the look-back.
func TestLookBackGolden(t *testing.T) {
	const path, asked = "../../docs/integrations/torch/tests/lookback.json", 64
	tr := tracetest.Generate(tracetest.Small, 7)
	_, tokens := trainedLookBack(t, tr, 2)
	// The trained factors of such a small trace are almost 1.
	m, random := &forecast.LookBack{Layers: tokens.Layers, Ranks: ranks, Depth: 2, Factor: make([]float32, tokens.Layers*ranks*ranks*ranks)}, rand.New(rand.NewPCG(7, 0))
	for i := range m.Factor {
		m.Factor[i] = float32(1+random.IntN(64)) / 16
	}
	golden := lookBackGolden{
		Ranks: m.Ranks, Depth: m.Depth, Vocabulary: tokens.Vocabulary, Best: tokens.Best, TokenRank: tokens.Rank, TokenScore: tokens.Score, Factor: m.Factor,
		Tokens: tr.Tokens[:asked],
	}
	bound, dst := m.Bind(tokens, hosts(tr), tr), make([]float32, ranks)
	for layer, of := range hosts(tr) {
		golden.RankOf = append(golden.RankOf, of)
		scores := make([][]int, asked)
		for position := range scores {
			bound.Score(dst, layer, position)
			for _, share := range dst {
				scores[position] = append(scores[position], int(math.Round(float64(share)*affinity.ScoreScale)))
			}
		}
		golden.Scores = append(golden.Scores, scores)
	}
	for position := range asked {
		var rows [][]uint16
		for layer := range tr.Model.Layers {
			rows = append(rows, tr.Row(position, layer))
		}
		golden.Experts = append(golden.Experts, rows)
	}
	text, err := json.Marshal(golden)
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, '\n')
	if *update {
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(path); err != nil || !bytes.Equal(want, text) {
		t.Errorf("%s differs from the output of the look-back, error %v: run go test ./solver/forecast -run LookBackGolden -args -update", path, err)
	}
}
