// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/semmoe/operator/internal/model/reshuffle"
)

// fault damages a permuted checkpoint. A faulty placement of experts and a faulty order of the gate's rows are the same
// to the model, so all faults reorder the rows of gates.
type fault func(dir string, p *reshuffle.Permutation, random *rand.Rand) error

// faults are the known faults, the one with the smallest effect first.
var faults = []struct {
	name  string
	plant fault
}{
	{"two experts of one layer swapped", func(dir string, p *reshuffle.Permutation, random *rand.Rand) error {
		layer := p.Layers[random.IntN(len(p.Layers))]
		order := make([]int, len(layer.NewToOld))
		for i := range order {
			order[i] = i
		}
		pair := random.Perm(len(order))
		order[pair[0]], order[pair[1]] = pair[1], pair[0]
		return reorderGate(dir, layer.Layer, order)
	}},
	// The experts are placed by the map, but every gate dispatches as if there were no map.
	{"map ignored at dispatch", func(dir string, p *reshuffle.Permutation, _ *rand.Rand) error {
		for _, layer := range p.Layers {
			if err := reorderGate(dir, layer.Layer, inverse(layer.NewToOld)); err != nil {
				return err
			}
		}
		return nil
	}},
	{"permutation of one layer wrong", func(dir string, p *reshuffle.Permutation, random *rand.Rand) error {
		layer := p.Layers[random.IntN(len(p.Layers))]
		return reorderGate(dir, layer.Layer, random.Perm(len(layer.NewToOld)))
	}},
	{"gate of one layer not permuted", func(dir string, p *reshuffle.Permutation, random *rand.Rand) error {
		layer := p.Layers[random.IntN(len(p.Layers))]
		return reorderGate(dir, layer.Layer, inverse(layer.NewToOld))
	}},
}

func inverse(order []int) []int {
	inverted := make([]int, len(order))
	for i, v := range order {
		inverted[v] = i
	}
	return inverted
}

// reorderGate moves row order[i] of the gate of a layer to row i, in the file of the checkpoint.
func reorderGate(dir string, layer int, order []int) error {
	name := fmt.Sprintf("model.layers.%d.mlp.gate.weight", layer)
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var header map[string]struct {
			Offsets [2]int `json:"data_offsets"`
		}
		size := 8 + int(binary.LittleEndian.Uint64(text))
		if err := json.Unmarshal(text[8:size], &header); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		tensor, found := header[name]
		if !found {
			continue
		}
		data := text[size+tensor.Offsets[0] : size+tensor.Offsets[1]]
		rows := append([]byte(nil), data...)
		width := len(data) / len(order)
		for i, from := range order {
			copy(data[i*width:][:width], rows[from*width:])
		}
		// The shards of a permuted checkpoint may be hard links to other checkpoints, so the damaged shard must be a new
		// file.
		if err := os.Remove(file); err != nil {
			return err
		}
		return os.WriteFile(file, text, 0o600)
	}
	return fmt.Errorf("%s has no tensor %s", dir, name)
}
