// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/probe/prompts"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/test/poll"
	"github.com/semmoe/operator/test/ports"
)

const (
	tinyModel  = "../refengine/testdata/tiny-qwen3moe"
	ranks      = 4
	rankHeader = "X-Data-Parallel-Rank"
)

// startEngine serves the small model on four ranks until the test ends. It waits until the engine serves.
func startEngine(t *testing.T, change func(*refengine.Options)) *Client {
	t.Helper()
	client, _ := startStoppable(t, change)
	return client
}

// startStoppable is like startEngine, and returns a function that stops the engine earlier.
func startStoppable(t *testing.T, change func(*refengine.Options)) (client *Client, stop func()) {
	t.Helper()
	o := refengine.DefaultOptions()
	o.ModelPath, o.ServedModelName, o.Threads, o.Port = tinyModel, "tiny", 2, ports.Reserve(t)
	o.TPSize, o.DPSize, o.EPSize, o.EnableDPAttention = ranks, ranks, ranks, true
	change(&o)
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		if err := refengine.Run(ctx, o); err != nil {
			t.Errorf("the engine exited with %v", err)
		}
	})
	stop = func() { cancel(); done.Wait() }
	t.Cleanup(stop)
	client = &Client{Address: fmt.Sprintf("http://127.0.0.1:%d", o.Port), Model: "tiny"}
	poll.Until(t, "healthy", func() bool {
		response, err := http.Get(client.Address + "/health")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return client, stop
}

// permutations returns random orders of the 32 experts of the four layers.
func permutations() [][]int {
	random := rand.New(rand.NewPCG(1, 0))
	var rows [][]int
	for range 4 {
		rows = append(rows, random.Perm(32))
	}
	return rows
}

// expertMap returns the file of an expert map with some layers in a random order.
func expertMap(t *testing.T, layers ...int) string {
	t.Helper()
	identity := make([]int, 32)
	for e := range identity {
		identity[e] = e
	}
	rows := [][]int{identity, identity, identity, identity}
	for _, l := range layers {
		rows[l] = permutations()[l]
	}
	text, err := json.Marshal(map[string]any{"physical_to_logical_map": rows})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func record(t *testing.T) *Answers {
	t.Helper()
	model, err := checkpoint.Inspect(tinyModel)
	if err != nil {
		t.Fatal(err)
	}
	a, err := Record(t.Context(), startEngine(t, func(*refengine.Options) {}), model.ModelDigest)
	if err != nil {
		t.Fatal(err)
	}
	for i, answer := range a.Prompts {
		if answer.Prompt != prompts.All[i] || len(answer.Tokens) == 0 || len(answer.PromptLogprobs) < 10 {
			t.Errorf("%d tokens and %d log-probabilities answer %q", len(answer.Tokens), len(answer.PromptLogprobs), answer.Prompt)
		}
	}
	return a
}

// TestCheckEngine checks that outputs are the same on every rank under any map and from a permuted checkpoint. An
// engine that ignores the map at dispatch is detected, even if only one layer is permuted.
func TestCheckEngine(t *testing.T) {
	answers := record(t)
	t.Run("map", func(t *testing.T) {
		client := startEngine(t, func(o *refengine.Options) { o.InitExpertLocation = expertMap(t, 0, 1, 2, 3) })
		if err := Check(t.Context(), client, answers, ranks, rankHeader); err != nil {
			t.Error(err)
		}
	})
	t.Run("permuted checkpoint", func(t *testing.T) {
		permutation := &reshuffle.Permutation{}
		for l, newToOld := range permutations() {
			permutation.Layers = append(permutation.Layers, reshuffle.LayerPermutation{Layer: l, NewToOld: newToOld})
		}
		out := filepath.Join(t.TempDir(), "model")
		if _, err := reshuffle.Run(t.Context(), reshuffle.Options{Model: tinyModel, Permutation: permutation, Out: out}); err != nil {
			t.Fatal(err)
		}
		client := startEngine(t, func(o *refengine.Options) { o.ModelPath = out })
		if err := Check(t.Context(), client, answers, ranks, rankHeader); err != nil {
			t.Error(err)
		}
	})
	for name, layers := range map[string][]int{"all layers": {0, 1, 2, 3}, "one layer": {2}} {
		t.Run("ignored map of "+name, func(t *testing.T) {
			client := startEngine(t, func(o *refengine.Options) {
				o.Fault, o.InitExpertLocation = refengine.FaultIgnoreMapAtDispatch, expertMap(t, layers...)
			})
			err := Check(t.Context(), client, answers, ranks, rankHeader)
			var difference *DifferenceError
			if !errors.As(err, &difference) || !strings.HasPrefix(err.Error(), "rank ") {
				t.Errorf("%v, want a difference", err)
			}
		})
	}
}
