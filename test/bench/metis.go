// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// metisTrace is the default trace of the comparison with METIS.
const metisTrace = "solver/testdata/tiny-32e-top4.safetensors.zst"

// metisResult compares our search with METIS on one trace and EP size, with the same profile, tables, dispatch and test
// requests.
type metisResult struct {
	Trace string `json:"trace"`
	Ranks int    `json:"ep_size"`
	// Methods holds our method first, then METIS on each graph.
	Methods []metisMethod `json:"methods"`
}

type metisMethod struct {
	Name string `json:"name"`
	// Seconds is the time of the search on all processors, CPU its processor time. For METIS, both include writing and
	// reading the graph files. They exclude the counts, which all methods share.
	Seconds float64 `json:"seconds"`
	CPU     float64 `json:"cpu_seconds"`
	// FreeLAR and EqualLAR are the held-out local activation rates of the token table with free and with equal shards.
	FreeLAR  float64 `json:"lar_free_shards"`
	EqualLAR float64 `json:"lar_equal_shards"`
}

// benchMETIS compares our search with METIS. It requires the program gpmetis.
func benchMETIS(ctx context.Context, path string) ([]metisResult, error) {
	if _, err := exec.LookPath("gpmetis"); err != nil {
		return nil, errors.New("gpmetis is not installed; install the package metis")
	}
	t, err := trace.Open(ctx, path)
	if err != nil {
		return nil, err
	}
	train, test, err := trace.Split(t, 20, 1)
	if err != nil {
		return nil, err
	}
	counts, err := affinity.CountTokens(ctx, t, train)
	if err != nil {
		return nil, err
	}
	pairs, err := affinity.CountPairs(ctx, t, train)
	if err != nil {
		return nil, err
	}
	var results []metisResult
	for _, ranks := range []int{4, 8, 16} {
		if placement.CheckRanks(ranks, t.Model.Experts) != nil {
			continue
		}
		r := metisResult{Trace: filepath.Base(path), Ranks: ranks}
		for _, method := range []struct {
			name  string
			place func() (*placement.Placement, float64, error)
		}{
			{"auto", func() (*placement.Placement, float64, error) { return placeOurs(ctx, t, counts, ranks) }},
			{"METIS, tokens and experts", func() (*placement.Placement, float64, error) {
				return placeMETIS(ctx, t, counts, ranks, func(l int) graph { return bipartite(&counts[l]) })
			}},
			{"METIS, co-activated experts", func() (*placement.Placement, float64, error) {
				return placeMETIS(ctx, t, counts, ranks, func(l int) graph { return coactivated(&pairs[l]) })
			}},
		} {
			begin := time.Now()
			p, cpu, err := method.place()
			if err != nil {
				return nil, err
			}
			m := metisMethod{Name: method.name, Seconds: time.Since(begin).Seconds(), CPU: cpu}
			if m.FreeLAR, m.EqualLAR, err = heldOut(ctx, t, p, counts, test); err != nil {
				return nil, err
			}
			r.Methods = append(r.Methods, m)
		}
		results = append(results, r)
	}
	return results, nil
}

func placeOurs(ctx context.Context, t *trace.Trace, counts []affinity.Counts, ranks int) (*placement.Placement, float64, error) {
	before := cpuSeconds()
	result, err := placement.Solve(ctx, placement.Problem{
		Attention: placement.TensorParallel, Ranks: ranks, Layers: t.Model.Layers, Tokens: counts, Algorithm: placement.Auto, Seed: 1, Shrinkage: placement.DefaultShrinkage,
	})
	return result.Placement, cpuSeconds() - before, err
}

// heldOut evaluates a placement and its token table on the test requests.
func heldOut(ctx context.Context, t *trace.Trace, p *placement.Placement, counts []affinity.Counts, test []int) (free, equal float64, err error) {
	hosts := make([]affinity.Hosts, len(counts))
	for l := range hosts {
		hosts[l] = p.Hosts(l)
	}
	table := affinity.NewTokenTable(counts, hosts, p.Ranks, 4, affinity.Estimator{Shrinkage: 1})
	o := solver.DefaultEvaluation()
	o.Requests, o.Seed, o.WithoutBounds = test, 1, true
	o.Shards = cost.FreeShards
	report, err := cost.TensorParallel(ctx, t, p, table.Forecast(t), o)
	if err != nil {
		return 0, 0, err
	}
	free = report.LAR
	o.Shards = cost.EqualShards
	report, err = cost.TensorParallel(ctx, t, p, table.Forecast(t), o)
	return free, report.LAR, err
}

// graph is an undirected graph for METIS. weights holds the weights of each vertex, one per constraint; edges holds the
// neighbors of each vertex, numbered from 0, and the edge weights. The first vertices are the experts.
type graph struct {
	weights [][]int
	edges   [][][2]int
	// slack is the allowed imbalance of each constraint.
	slack string
}

// bipartite returns a graph of experts and token IDs with an edge for each token ID and expert that it activated. Each
// part must have the same number of experts and balanced occurrences of token IDs. The weight of the cut is the number
// of remote activations.
func bipartite(c *affinity.Counts) graph {
	g := graph{weights: make([][]int, c.Experts), edges: make([][][2]int, c.Experts), slack: "1.001 1.05"}
	for e := range g.weights {
		g.weights[e] = []int{1, 0}
	}
	for id, n := range c.Occurrences {
		if n == 0 {
			continue
		}
		vertex := len(g.weights)
		g.weights, g.edges = append(g.weights, []int{0, int(n)}), append(g.edges, nil)
		experts, counts := c.Row(id)
		for i, e := range experts {
			g.edges[vertex] = append(g.edges[vertex], [2]int{int(e), int(counts[i])})
			g.edges[e] = append(g.edges[e], [2]int{vertex, int(counts[i])})
		}
	}
	return g
}

// coactivated returns a graph of only the experts, with an edge between two experts that a token activated together.
func coactivated(p *affinity.Pairs) graph {
	g := graph{weights: make([][]int, p.Experts), edges: make([][][2]int, p.Experts), slack: "1.001"}
	for e := range p.Experts {
		g.weights[e] = []int{1}
		for f := range p.Experts {
			if n := int(p.Together[e*p.Experts+f]); e != f && n > 0 {
				g.edges[e] = append(g.edges[e], [2]int{f, n})
			}
		}
	}
	return g
}

// write writes the graph in the file format of METIS: a header, and a line for each vertex with its weights and its
// neighbors, numbered from 1.
func (g *graph) write(path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	edges := 0
	for _, neighbours := range g.edges {
		edges += len(neighbours)
	}
	out := bufio.NewWriter(file)
	fmt.Fprintf(out, "%d %d 011 %d\n", len(g.weights), edges/2, len(g.weights[0]))
	var line []byte
	for v, weights := range g.weights {
		line = line[:0]
		for _, w := range weights {
			line = append(strconv.AppendInt(line, int64(w), 10), ' ')
		}
		for _, edge := range g.edges[v] {
			line = append(strconv.AppendInt(line, int64(edge[0]+1), 10), ' ')
			line = append(strconv.AppendInt(line, int64(edge[1]), 10), ' ')
		}
		if _, err := out.Write(append(line, '\n')); err != nil {
			return err
		}
	}
	return out.Flush()
}

// part runs METIS and returns the part of each vertex and the processor time of METIS.
func (g *graph) part(ctx context.Context, path string, parts int) ([]int, time.Duration, error) {
	if err := g.write(path); err != nil {
		return nil, 0, err
	}
	command := exec.CommandContext(ctx, "gpmetis", "-ptype=kway", "-seed=1", "-ubvec="+g.slack, path, strconv.Itoa(parts))
	if out, err := command.CombinedOutput(); err != nil {
		return nil, 0, fmt.Errorf("gpmetis: %w\n%s", err, out)
	}
	taken := command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	file, err := os.Open(fmt.Sprintf("%s.part.%d", path, parts))
	if err != nil {
		return nil, 0, err
	}
	defer file.Close()
	part := make([]int, 0, len(g.weights))
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		p, err := strconv.Atoi(lines.Text())
		if err != nil || p < 0 || p >= parts {
			return nil, 0, fmt.Errorf("gpmetis wrote %q as the part of vertex %d; want a number from 0 to %d", lines.Text(), len(part), parts-1)
		}
		part = append(part, p)
	}
	if len(part) != len(g.weights) {
		return nil, 0, fmt.Errorf("gpmetis wrote parts for %d of %d vertices", len(part), len(g.weights))
	}
	return part, taken, lines.Err()
}

// placeMETIS partitions the graph of every layer, and repairs the parts so that each has the same number of experts.
func placeMETIS(ctx context.Context, t *trace.Trace, counts []affinity.Counts, ranks int, of func(layer int) graph) (*placement.Placement, float64, error) {
	dir, err := os.MkdirTemp("", "bench-metis-")
	if err != nil {
		return nil, 0, err
	}
	defer os.RemoveAll(dir)
	before := cpuSeconds()
	p := placement.Contiguous(t.Model.Layers, t.Model.Experts, ranks)
	failures := make([]error, len(counts))
	var theirs atomic.Int64
	err = affinity.Parallel(ctx, len(counts), func(l int) {
		g := of(l)
		part, taken, err := g.part(ctx, filepath.Join(dir, strconv.Itoa(l)), ranks)
		if err != nil {
			failures[l] = err
			return
		}
		theirs.Add(int64(taken))
		p.Layers[l].Slots = repaired(&g, part, t.Model.Experts, ranks)
	})
	if err == nil {
		err = errors.Join(failures...)
	}
	if err == nil {
		err = p.Validate()
	}
	return p, cpuSeconds() - before + time.Duration(theirs.Load()).Seconds(), err
}

// repaired assigns the same number of experts to each part. It maximizes the weight of the experts' edges into their
// parts with an exact assignment.
func repaired(g *graph, part []int, experts, ranks int) []int {
	weight := make([]float32, experts*ranks)
	for e := range experts {
		for _, edge := range g.edges[e] {
			weight[e*ranks+part[edge[0]]] += float32(edge[1])
		}
	}
	var exact assign.Solver
	rankOf := exact.Assign(weight, slices.Repeat([]int{experts / ranks}, ranks))
	slots := make([]int, 0, experts)
	for rank := range ranks {
		for e, r := range rankOf {
			if r == rank {
				slots = append(slots, e)
			}
		}
	}
	return slots
}
