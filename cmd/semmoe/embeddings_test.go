// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/trace"
)

// tinyEmbeddings writes the embeddings of the tiny checkpoint as a .npy file.
func tinyEmbeddings(t *testing.T) string {
	t.Helper()
	c, err := checkpoint.Open(clitest.TinyModel)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	values, err := c.Float32("model.embed_tokens.weight")
	if err != nil {
		t.Fatal(err)
	}
	const vocabulary = 4096
	header := fmt.Sprintf("{'descr': '<f4', 'fortran_order': False, 'shape': (%d, %d), }\n", vocabulary, len(values)/vocabulary)
	out := binary.LittleEndian.AppendUint16([]byte("\x93NUMPY\x01\x00"), uint16(len(header)))
	out = append(out, header...)
	for _, v := range values {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
	}
	path := filepath.Join(t.TempDir(), "embeddings.npy")
	if err := os.WriteFile(path, out, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// unseenLAR returns the local share of the activations of tokens outside the train requests, each on the best rank in
// its row of the token table.
func unseenLAR(t *testing.T, path, dir string) float64 {
	t.Helper()
	p, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := trace.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	train, test, err := trace.Split(tr, p.TrainPercent, p.Seed)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int32]bool{}
	for _, r := range train {
		for _, id := range tr.Request(r) {
			seen[id] = true
		}
	}
	shares := make([]float32, p.Placement.Ranks)
	local, all := 0, 0
	for l := range tr.Model.Layers {
		hosts := p.Placement.Hosts(l)
		for _, r := range test {
			for position := int(tr.Offsets[r]); position < int(tr.Offsets[r+1]); position++ {
				if seen[tr.Tokens[position]] {
					continue
				}
				p.Tokens.ScoreToken(shares, l, tr.Tokens[position])
				best := slices.Index(shares, slices.Max(shares))
				for _, expert := range tr.Row(position, l) {
					if slices.Contains(hosts[expert], best) {
						local++
					}
					all++
				}
			}
		}
	}
	if all < 1000 {
		t.Fatalf("%d activations of unseen tokens are too few", all)
	}
	return float64(local) / float64(all)
}

// TestEmbeddingsPlaceUnseenTokens compares plans with and without embeddings on unseen tokens.
func TestEmbeddingsPlaceUnseenTokens(t *testing.T) {
	embeddings := tinyEmbeddings(t)
	path := partOfSample(t, 1)
	plain, before := solved(t, "tp", "--trace", path)
	near, after := solved(t, "tp", "--trace", path, "--embeddings", embeddings)
	without, with := unseenLAR(t, path, plain), unseenLAR(t, path, near)
	t.Logf("tokens that were not seen: %.3f without embeddings, %.3f with; all tokens: %.4f, %.4f", without, with, before["lar"], after["lar"])
	if with < without+0.2 || after["lar"].(float64) < before["lar"].(float64) {
		t.Errorf("local activation rate of unseen tokens: %.3f without embeddings, %.3f with; of all tokens: %v, %v", without, with, before["lar"], after["lar"])
	}
	for name, test := range map[string]struct {
		path string
		code int
		want string
	}{
		"no file":          {"none.npy", cli.ExitInvalidFile, "--embeddings: open none.npy"},
		"not npy":          {clitest.SampleTrace, cli.ExitInvalidFile, "is not a .npy file"},
		"other vocabulary": {embeddings, cli.ExitInvalidFile, "--embeddings: 4096 rows; the trace's vocabulary is 100"},
	} {
		args := []string{"--trace", groupedTrace(t, 0), "--ep", "4", "--attention", "dp", "--out", filepath.Join(t.TempDir(), "plan"), "--embeddings", test.path}
		if code, _, message := clitest.RunJSON(t, newSolveCommand(), args...); code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, test.code, test.want)
		}
	}
}
