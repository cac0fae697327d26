// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestAutoReachesTheOptimumOfAnExactSolver compares with an integer linear program that is independent of the search's
// prices and value function. It requires cbc (Debian package coinor-cbc) and is skipped without it.
func TestAutoReachesTheOptimumOfAnExactSolver(t *testing.T) {
	if testing.Short() {
		t.Skip("the exact program is solved without -short")
	}
	cbc, err := exec.LookPath("cbc")
	if err != nil {
		t.Skip("cbc is not installed: the comparison with an exact integer program is left out")
	}
	shape := tracetest.Shape{TopK: 2, Layers: 1, Vocabulary: 12, Domains: 2, DocumentsPerDomain: 2, RequestsPerDocument: 2, TokensPerRequest: 20, Noise: 20}
	for i, size := range []struct{ experts, ranks int }{{6, 2}, {6, 3}, {8, 2}, {8, 4}} {
		shape.Experts = size.experts
		p := problem(t, tracetest.Generate(shape, uint64(i)), placement.TensorParallel, size.ranks)
		got, want := solve(t, p).TrainLAR, exactOptimum(t, cbc, &p.Tokens[0], size.ranks)
		if math.Abs(got-want) > 1e-3*want {
			t.Errorf("instance %d, %d experts on %d ranks: %v, the integer program's optimum is %v", i, size.experts, size.ranks, got, want)
		}
	}
}

// exactOptimum returns the maximum local activation rate of all placements with the best balanced assignment of token
// IDs, which may be split over ranks. Variables: x is 1 if a rank has an expert, y is the part of a token ID's
// occurrences on a rank, and z is the part of y that finds the expert there.
func exactOptimum(t *testing.T, cbc string, c *affinity.Counts, ranks int) float64 {
	t.Helper()
	var objective, constraints, binaries bytes.Buffer
	sum := func(name string, terms []string, relation string, limit float64) {
		fmt.Fprintf(&constraints, " %s: %s %s %v\n", name, strings.Join(terms, " + "), relation, limit)
	}
	occurrences, activations := 0.0, 0.0
	load := make([][]string, ranks)
	for token, n := range c.Occurrences {
		if n == 0 {
			continue
		}
		occurrences += float64(n)
		var parts []string
		experts, counts := c.Row(token)
		for rank := range ranks {
			y := fmt.Sprintf("y%d_%d", token, rank)
			parts, load[rank] = append(parts, y), append(load[rank], fmt.Sprintf("%v %s", n, y))
			for k, e := range experts {
				z := fmt.Sprintf("z%d_%d_%d", token, e, rank)
				fmt.Fprintf(&objective, " - %v %s", counts[k], z)
				fmt.Fprintf(&constraints, " a%s: %s - %s <= 0\n b%s: %s - x%d_%d <= 0\n", z, z, y, z, z, e, rank)
			}
		}
		for _, n := range counts {
			activations += float64(n)
		}
		sum(fmt.Sprintf("token%d", token), parts, "=", 1)
	}
	for rank := range ranks {
		sum(fmt.Sprintf("load%d", rank), load[rank], "<=", occurrences/float64(ranks))
		var slots []string
		for e := range c.Experts {
			slots = append(slots, fmt.Sprintf("x%d_%d", e, rank))
		}
		sum(fmt.Sprintf("slots%d", rank), slots, "=", float64(c.Experts/ranks))
	}
	for e := range c.Experts {
		var places []string
		for rank := range ranks {
			// Ranks are interchangeable: expert e need not be beyond rank e.
			if x := fmt.Sprintf("x%d_%d", e, rank); rank <= e {
				places = append(places, x)
			} else {
				fmt.Fprintf(&constraints, " name%s: %s = 0\n", x, x)
			}
			fmt.Fprintf(&binaries, " x%d_%d\n", e, rank)
		}
		sum(fmt.Sprintf("expert%d", e), places, "=", 1)
	}
	dir := t.TempDir()
	program, solution := filepath.Join(dir, "p.lp"), filepath.Join(dir, "solution")
	text := "Minimize\n obj:" + objective.String() + "\nSubject To\n" + constraints.String() + "Binary\n" + binaries.String() + "End\n"
	if err := os.WriteFile(program, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), cbc, program, "solve", "solution", solution).CombinedOutput(); err != nil {
		t.Fatalf("cbc: %v\n%s", err, out)
	}
	file, err := os.Open(solution)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Scan()
	value := 0.0
	if _, err := fmt.Sscanf(lines.Text(), "Optimal - objective value %g", &value); err != nil {
		t.Fatalf("cbc's solution begins with %q: %v", lines.Text(), err)
	}
	return -value / activations
}
