// SPDX-License-Identifier: Apache-2.0

package prompts_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/lab/prompts"
)

func TestPrompt(t *testing.T) {
	table := &embedding.Table{Tokens: 2, Size: 2, Values: []float32{1, 0, 0, 4}}
	for want, tokens := range map[string][]int32{"[0.5 2]": {0, 1}, "[1 0]": {0, 0, -1, 7}, "[0 0]": {9}} {
		if got := fmt.Sprint(prompts.Mean(table, tokens)); got != want {
			t.Errorf("%v: %s; want %s", tokens, got, want)
		}
	}
}

// TestProjectionKeepsDistances compares the distances of random bags with the distances of their projections.
func TestProjectionKeepsDistances(t *testing.T) {
	const vocabulary = 500
	random := rand.New(rand.NewPCG(1, 1))
	table := prompts.Projected(vocabulary, 256, 1)
	again := prompts.Projected(vocabulary, 256, 1)
	if diff := cmp.Diff(table.Prompt([]int32{3, 499, 3, 7}), again.Prompt([]int32{3, 499, 3, 7})); diff != "" {
		t.Error(diff)
	}
	for range 50 {
		var bags [2][]int32
		exact := make([]float64, vocabulary)
		for side := range bags {
			for range 300 {
				id := int32(random.IntN(vocabulary))
				bags[side] = append(bags[side], id)
				exact[id] += float64(1-2*side) / 300
			}
		}
		want, got := 0.0, 0.0
		for _, d := range exact {
			want += d * d
		}
		a, b := table.Prompt(bags[0]), table.Prompt(bags[1])
		for i := range a {
			got += float64(a[i]-b[i]) * float64(a[i]-b[i])
		}
		if got < want*0.6 || got > want*1.4 {
			t.Errorf("squared distance %v, of the bags %v", got, want)
		}
	}
}

func TestKMeansFindsPlantedClusters(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	var points [][]float32
	for i := range 120 {
		point := []float32{random.Float32() / 10, random.Float32() / 10, random.Float32() / 10}
		point[i%3]++
		points = append(points, point)
	}
	space := prompts.NewSpace(points)
	for i := range points {
		points[i] = space.Direction(points[i])
	}
	clusters := prompts.KMeans(points, 3, 1)
	names := map[int]int{}
	for i, point := range points {
		if i < 3 {
			names[clusters.Nearest(point)] = i
		}
		if name, known := names[clusters.Nearest(point)]; !known || name != i%3 {
			t.Fatalf("point %d of cluster %d is in %d", i, i%3, name)
		}
	}
	// More clusters than distinct points.
	if c := prompts.KMeans([][]float32{{1, 0}, {1, 0}}, 5, 1); c.Nearest([]float32{1, 0}) < 0 {
		t.Error("no cluster")
	}
}
