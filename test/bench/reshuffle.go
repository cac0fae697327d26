// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"syscall"
	"time"
)

const (
	reshufflePairs               = 3
	reshuffleGoal, memoryGoalMiB = 0.9, 256
)

// generated describes a generated checkpoint with the names of Qwen3-MoE. Each of the three projections of an expert
// has rows times columns BF16 elements, in a tensor for each suffix.
type generated struct {
	layers, experts, shards int
	rows, columns           int
	suffixes                []string
}

var (
	// large has 8 GiB, with one tensor per expert and projection.
	large = generated{layers: 32, experts: 64, shards: 16, rows: 1408 / 2, columns: 1024, suffixes: []string{"weight"}}
	// manyTensors has 299,585 small tensors, as many as a quantised model with 65 layers of DeepSeek-V3's shape.
	manyTensors = generated{layers: 65, experts: 256, rows: 16, columns: 16,
		suffixes: []string{"weight", "weight_scale", "weight_scale_2", "input_scale", "weight_offset", "weight_zero_point"}}
)

// reshuffleResult compares `semmoe reshuffle` with copying the same files. The two alternate in one run.
type reshuffleResult struct {
	GiB float64 `json:"gib"`
	// Reshuffle and Copy are the median seconds of `semmoe reshuffle` and of `cp --reflink=never` with sync.
	Reshuffle float64 `json:"reshuffle_seconds"`
	Copy      float64 `json:"copy_seconds"`
	// SpeedToCopy is the speed of `semmoe reshuffle` relative to the copy.
	SpeedToCopy float64 `json:"speed_to_copy"`
	Goal        float64 `json:"speed_goal"`
	PeakMiB     float64 `json:"peak_mib"`
	MemoryGoal  float64 `json:"peak_goal_mib"`
}

// tensorsResult is the cost of `semmoe inspect` and `semmoe reshuffle` for a checkpoint of many small tensors.
type tensorsResult struct {
	Tensors          int     `json:"tensors"`
	Inspect          float64 `json:"inspect_seconds"`
	InspectPeakMiB   float64 `json:"inspect_peak_mib"`
	Reshuffle        float64 `json:"reshuffle_seconds"`
	ReshufflePeakMiB float64 `json:"reshuffle_peak_mib"`
	MemoryGoal       float64 `json:"peak_goal_mib"`
}

// benchTensors generates a checkpoint of 300,000 tensors in a temporary directory, once in a file per layer and once in
// one file. Times and peaks are the maximum of both and of several runs, because peaks depend on when the garbage
// collector runs.
func benchTensors(ctx context.Context) (tensorsResult, error) {
	dir, err := os.MkdirTemp("", "bench-tensors-")
	if err != nil {
		return tensorsResult{}, err
	}
	defer os.RemoveAll(dir)
	permutation, out := filepath.Join(dir, "permutation.json"), filepath.Join(dir, "out")
	if err := manyTensors.writePermutation(permutation); err != nil {
		return tensorsResult{}, err
	}
	r := tensorsResult{Tensors: manyTensors.layers * (1 + 3*manyTensors.experts*len(manyTensors.suffixes)), MemoryGoal: memoryGoalMiB}
	for _, shards := range []int{manyTensors.layers, 1} {
		g, model := manyTensors, filepath.Join(dir, fmt.Sprintf("model-%d", shards))
		g.shards = shards
		if _, err := g.writeModel(model); err != nil {
			return r, err
		}
		for range reshufflePairs {
			seconds, peak, err := timed(ctx, out, "bin/semmoe", "inspect", "--model-path", model)
			if err != nil {
				return r, err
			}
			r.Inspect, r.InspectPeakMiB = max(r.Inspect, seconds), max(r.InspectPeakMiB, peak)
			if seconds, peak, err = timed(ctx, out, "bin/semmoe", "reshuffle", "--model", model, "--permutation", permutation, "--out", out); err != nil {
				return r, err
			}
			r.Reshuffle, r.ReshufflePeakMiB = max(r.Reshuffle, seconds), max(r.ReshufflePeakMiB, peak)
		}
	}
	return r, nil
}

// benchReshuffle generates a checkpoint in a temporary directory. The disk must have room for three times its size.
func benchReshuffle(ctx context.Context) (reshuffleResult, error) {
	dir, err := os.MkdirTemp("", "bench-reshuffle-")
	if err != nil {
		return reshuffleResult{}, err
	}
	defer os.RemoveAll(dir)
	model, permutation := filepath.Join(dir, "model"), filepath.Join(dir, "permutation.json")
	size, err := large.writeModel(model)
	if err != nil {
		return reshuffleResult{}, err
	}
	if err := large.writePermutation(permutation); err != nil {
		return reshuffleResult{}, err
	}
	r := reshuffleResult{GiB: float64(size) / (1 << 30), Goal: reshuffleGoal, MemoryGoal: memoryGoalMiB}
	var ours, copies []float64
	for range reshufflePairs {
		seconds, peak, err := timed(ctx, filepath.Join(dir, "ours"), "bin/semmoe", "reshuffle", "--model", model, "--permutation", permutation, "--out", filepath.Join(dir, "ours"))
		if err != nil {
			return r, err
		}
		ours, r.PeakMiB = append(ours, seconds), max(r.PeakMiB, peak)
		target := filepath.Join(dir, "copy")
		if seconds, _, err = timed(ctx, target, "sh", "-c", `cp -r --reflink=never "$0" "$1" && sync "$1"/*`, model, target); err != nil {
			return r, err
		}
		copies = append(copies, seconds)
	}
	slices.Sort(ours)
	slices.Sort(copies)
	r.Reshuffle, r.Copy = ours[len(ours)/2], copies[len(copies)/2]
	r.SpeedToCopy = r.Copy / r.Reshuffle
	return r, nil
}

// timed runs a command that creates a directory, and then removes the directory, so that each run writes to a new
// target.
func timed(ctx context.Context, made string, name string, args ...string) (seconds, peakMiB float64, err error) {
	if err := resetPeak(); err != nil {
		return 0, 0, err
	}
	command := exec.CommandContext(ctx, name, args...)
	command.Stderr = os.Stderr
	begin := time.Now()
	if err := command.Run(); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", name, err)
	}
	seconds = time.Since(begin).Seconds()
	if usage, ok := command.ProcessState.SysUsage().(*syscall.Rusage); ok {
		peakMiB = float64(usage.Maxrss) / 1024
	}
	if err := os.RemoveAll(made); err != nil {
		return 0, 0, err
	}
	// Flush the writes of the removal, so that they do not count for the next run.
	syscall.Sync()
	return seconds, peakMiB, nil
}

// resetPeak makes the peak memory of this process its present memory. The peak of a command begins with that of the process
// that starts it, which has generated the model.
func resetPeak() error {
	debug.FreeOSMemory()
	return os.WriteFile("/proc/self/clear_refs", []byte("5"), 0)
}

type tensorEntry struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// writeModel writes a checkpoint with the shape of Qwen3-MoE and random bytes, and returns its size in bytes.
func (g generated) writeModel(dir string) (int64, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 0, err
	}
	config := map[string]any{
		"model_type": "qwen3_moe", "architectures": []string{"Qwen3MoeForCausalLM"}, "num_hidden_layers": g.layers, "hidden_size": g.columns,
		"num_experts": g.experts, "num_experts_per_tok": 8, "moe_intermediate_size": g.rows, "vocab_size": 1024, "torch_dtype": "bfloat16",
		"decoder_sparse_step": 1, "mlp_only_layers": []int{}, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": g.rows, "head_dim": 64,
	}
	text, err := json.Marshal(config)
	if err != nil {
		return 0, err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644); err != nil {
		return 0, err
	}
	index := map[string]string{}
	var total int64
	for shard := range g.shards {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", shard+1, g.shards)
		size, err := g.writeShard(filepath.Join(dir, name), shard, func(tensor string) { index[tensor] = name })
		if err != nil {
			return 0, err
		}
		total += size
	}
	text, err = json.Marshal(map[string]any{"metadata": map[string]any{"total_size": total}, "weight_map": index})
	if err != nil {
		return 0, err
	}
	return total, os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), text, 0o644)
}

// writeShard writes the layers of one shard.
func (g generated) writeShard(path string, shard int, named func(tensor string)) (int64, error) {
	header := map[string]tensorEntry{}
	var end int64
	add := func(name string, shape ...int) {
		size := int64(2)
		for _, d := range shape {
			size *= int64(d)
		}
		header[name] = tensorEntry{"BF16", shape, [2]int64{end, end + size}}
		end += size
		named(name)
	}
	perShard := g.layers / g.shards
	for layer := shard * perShard; layer < (shard+1)*perShard; layer++ {
		add(fmt.Sprintf("model.layers.%d.mlp.gate.weight", layer), g.experts, g.columns)
		for expert := range g.experts {
			prefix := fmt.Sprintf("model.layers.%d.mlp.experts.%d.", layer, expert)
			for _, suffix := range g.suffixes {
				add(prefix+"gate_proj."+suffix, g.rows, g.columns)
				add(prefix+"up_proj."+suffix, g.rows, g.columns)
				add(prefix+"down_proj."+suffix, g.columns, g.rows)
			}
		}
	}
	text, err := json.Marshal(header)
	if err != nil {
		return 0, err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	file, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	if _, err := file.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)); err != nil {
		return 0, err
	}
	random := rand.NewChaCha8([32]byte{byte(shard)})
	chunk := make([]byte, 1<<20)
	for left := end; left > 0; left -= int64(len(chunk)) {
		chunk = chunk[:min(int64(cap(chunk)), left)]
		random.Read(chunk) //nolint:errcheck // never fails
		if _, err := file.Write(chunk); err != nil {
			return 0, err
		}
	}
	return end, file.Sync()
}

// writePermutation writes a random order of the experts of every layer.
func (g generated) writePermutation(path string) error {
	type layer struct {
		Layer    int   `json:"layer"`
		NewToOld []int `json:"new_to_old"`
	}
	random := rand.New(rand.NewPCG(1, 2))
	var layers []layer
	for l := range g.layers {
		layers = append(layers, layer{l, random.Perm(g.experts)})
	}
	text, err := json.Marshal(map[string]any{"layers": layers})
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}
