// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
)

// TestSmallTracesNeedLittleMemory runs commands on small traces with a header that claims a large model.
func TestSmallTracesNeedLittleMemory(t *testing.T) {
	for name, test := range map[string]struct {
		content []byte
		refusal string
	}{
		"experts":            {clitest.CraftedTrace(4, 1, 1<<16, 1, 100), "counts; allowed are"},
		"experts of layers":  {clitest.CraftedTrace(4, 256, 1<<14, 1, 100), "counts; allowed are"},
		"experts of a token": {clitest.CraftedTrace(4, 1, 1<<14, 1<<13, 100), "counts; allowed are"},
		"requests":           {clitest.CraftedTrace(7000, 1, 1<<13, 1, 100), "counts; allowed are"},
		"vocabulary":         {clitest.CraftedTrace(4, 2, 8, 1, 1<<24), "vocab_size is 16777216; allowed is"},
		"ids of layers":      {clitest.CraftedTrace(4, 4096, 8, 1, 1<<13), "counts; allowed are"},
		"short requests":     {clitest.CraftedTrace(7000, 1, 8, 1, 100), ""},
		"largest vocabulary": {clitest.CraftedTrace(4, 1, 8, 1, 1<<20), ""},
		"largest model":      {clitest.CraftedTrace(4, 12, 8, 1, 1<<20), ""}, // by token ids in all layers
	} {
		if len(test.content) > 128<<10 {
			t.Fatalf("%s has %d bytes", name, len(test.content))
		}
		path := filepath.Join(t.TempDir(), "trace.safetensors")
		if err := os.WriteFile(path, test.content, 0o600); err != nil {
			t.Fatal(err)
		}
		for command, args := range map[string][]string{
			"solve":    {"solve", "--trace", path, "--ep", "8", "--attention", "dp", "--time-budget", "1s", "--out", filepath.Join(t.TempDir(), "plan")},
			"solve tp": {"solve", "--trace", path, "--ep", "8", "--attention", "tp", "--time-budget", "1s", "--out", filepath.Join(t.TempDir(), "plan")},
		} {
			t.Run(name+"/"+command, func(t *testing.T) {
				clitest.RunInLittleMemory(t, test.refusal, args...)
			})
		}
	}
}

// craftPlan changes files of a plan, and its manifest with the correct digests, in a copy of the plan's directory.
func craftPlan(t *testing.T, from string, files map[string]string, change func(manifest map[string]any)) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, plan.ManifestFile))
	if err != nil {
		t.Fatal(err)
	}
	var manifest map[string]any
	if err := json.Unmarshal(text, &manifest); err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		sum := fmt.Sprintf("%x", sha256.Sum256([]byte(content)))
		manifest["files"].(map[string]any)[name] = sum
		if name == plan.PlacementFile {
			manifest["layout_digest"] = sum
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	change(manifest)
	if text, err = json.Marshal(manifest); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, plan.ManifestFile), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// craftedPlacement returns the text of a placement with one slot on each rank.
func craftedPlacement(ranks, layers, experts int) string {
	p := placement.Placement{Ranks: ranks, Experts: experts, SlotsPerRank: 1}
	for l := range layers {
		slots := make([]int, ranks)
		for i := range slots {
			slots[i] = i % experts
		}
		p.Layers = append(p.Layers, placement.Layer{Layer: l, Slots: slots})
	}
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // numbers are valid JSON
	}
	return string(text)
}

// safetensors returns a file with a header and a header length, which may differ from the actual length.
func safetensors(length uint64, header string) string {
	return string(binary.LittleEndian.AppendUint64(nil, length)) + header
}

// TestSmallInputsNeedLittleMemory runs commands on plans and other files of up to a few megabytes. Their headers claim
// more data, or their content needs more memory than its size.
func TestSmallInputsNeedLittleMemory(t *testing.T) {
	from, _ := samplePlan(t, "dp")
	recorded := partOfSample(t, samplePart)
	repeat := func(begin, part string, bytes int, end string) string {
		return begin + strings.Repeat(part, bytes/len(part)) + end
	}
	same := func(map[string]any) {}
	const megabytes = 3 << 20
	claims := `{"token_rank_score":{"dtype":"U16","shape":[1099511627776],"data_offsets":[0,2199023255552]}}`
	bomb := "a0: &a0 [0,0,0,0,0,0,0,0,0]\n"
	for i := range 9 {
		bomb += fmt.Sprintf("a%d: &a%d [%s*a%d]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d,", i), 8), i)
	}
	for name, test := range map[string]struct {
		files   map[string]string
		change  func(manifest map[string]any)
		refusal string
	}{
		"header length":     {map[string]string{plan.TablesFile: safetensors(1<<40, "{}")}, same, "the header has 1099511627776 bytes; at most"},
		"tensor size":       {map[string]string{plan.TablesFile: safetensors(uint64(len(claims)), claims)}, same, "the file has 0 bytes of data"},
		"many tensors":      {map[string]string{plan.TablesFile: safetensors(megabytes, repeat("", " ", megabytes, ""))}, same, "at most 1048576 are read"},
		"hidden layers":     {nil, func(m map[string]any) { m["hidden_layers"] = 1 << 40 }, "hidden_layers is 1099511627776; allowed is up to 4096"},
		"vocabulary":        {nil, func(m map[string]any) { m["vocab_size"] = 1 << 40 }, "has shape"},
		"long manifest":     {nil, func(m map[string]any) { m["x"] = strings.Repeat("x", megabytes) }, "at most 1048576 bytes are read"},
		"ranks":             {map[string]string{plan.PlacementFile: craftedPlacement(1<<16, 1, 256)}, same, "ep_size is 65536; allowed is 1 to 1024"},
		"ranks of layers":   {map[string]string{plan.PlacementFile: craftedPlacement(1024, 600, 32)}, same, "ep_size is 1024 for 600 layers"},
		"no layers":         {map[string]string{plan.PlacementFile: repeat(`{"ep_size":4,"num_experts":32,"slots_per_rank":8,"layers":[{}`, ",{}", megabytes, "]}")}, same, "layers"},
		"map of anything":   {map[string]string{"engine/trtllm.yaml": repeat("num_slots: 32\nx:\n", "- - -\n", megabytes, "")}, same, "a map of placement.json has at most"},
		"map of aliases":    {map[string]string{"engine/trtllm.yaml": bomb}, same, "trtllm.yaml"},
		"map of devices":    {map[string]string{"engine/vllm-ascend.json": repeat(`{"layer_list":[{"device_list":[{}`, ",{}", megabytes, "]}]}")}, same, "a map of placement.json has at most"},
		"map of no experts": {map[string]string{"engine/sglang.json": repeat(`{"physical_to_logical_map":[[]`, ",[]", megabytes, "]}")}, same, "a map of placement.json has at most"},
		"text too long":     {map[string]string{plan.PlacementFile: repeat("", " ", 33<<20, "")}, same, "at most 33554432 bytes are read"},
		"hardware":          {map[string]string{plan.HardwareFile: repeat(`{"a2e":[{}`, ",{}", 1<<20-100, "]}")}, same, "hardware.json"},
		"long hardware":     {map[string]string{plan.HardwareFile: strings.Repeat(" ", megabytes)}, same, "at most 1048576 bytes are read"},
	} {
		dir := craftPlan(t, from, test.files, test.change)
		for command, args := range map[string][]string{
			"eval":  {"eval", "--plan", dir, "--trace", recorded},
			"solve": {"solve", "--current", dir, "--trace", recorded, "--ep", "4", "--attention", "dp", "--out", filepath.Join(t.TempDir(), "plan")},
		} {
			t.Run(name+"/"+command, func(t *testing.T) { clitest.RunInLittleMemory(t, test.refusal, args...) })
		}
	}

	numbers := func(shape string) string {
		header := "{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + ", }\n"
		return "\x93NUMPY\x01\x00" + string(binary.LittleEndian.AppendUint16(nil, uint16(len(header)))) + header + strings.Repeat("\x00", megabytes)
	}
	for name, test := range map[string]struct{ file, content, refusal string }{
		"embeddings of gigabytes": {"m.npy", numbers("(1073741823, 2)"), "the file has 3145728"},
		"one long embedding":      {"m.npy", numbers("(1, 786432)"), "has 786432 numbers in each row; allowed are up to 32768"},
		"profile of nothing":      {"p.json", repeat(`{"a2e":[{}`, ",{}", 1<<20-100, "]}"), "--hardware"},
		"profile of lists":        {"p.json", repeat(`{"grouped_gemm":{"fit":{"residuals":[0`, ",0", 1<<20-100, "]}}}"), "--hardware"},
		"long profile":            {"p.json", strings.Repeat(" ", megabytes), "at most 1048576 bytes are read"},
	} {
		path := clitest.WriteFile(t, test.file, test.content)
		args := []string{"solve", "--trace", recorded, "--ep", "4", "--attention", "tp", "--out", filepath.Join(t.TempDir(), "plan")}
		switch test.file {
		case "m.npy":
			args = append(args, "--embeddings", path)
		case "p.json":
			args = append(args, "--hardware", path)
		}
		t.Run(name, func(t *testing.T) { clitest.RunInLittleMemory(t, test.refusal, args...) })
	}
}

// TestManyRanksNeedLittleMemory evaluates the largest plan on requests of one token: allocations by request and rank,
// and by pairs of ranks, are bounded.
func TestManyRanksNeedLittleMemory(t *testing.T) {
	const ranks, experts, vocabulary = 1024, 32, 100
	for layers, test := range map[int]struct {
		requests int
		refusal  string
	}{128: {200, ""}, 1: {20_000, "scores; allowed are 16777216"}} {
		p := &solver.Plan{
			Attention: placement.DataParallel, Forecast: solver.Table, Algorithm: placement.ContiguousAlgorithm, Placement: &placement.Placement{},
			HiddenLayers: layers, Vocabulary: vocabulary, TrainPercent: 20, Seed: 1,
			Ranks: &affinity.RankTable{Ranks: ranks, Score: make([]uint16, vocabulary*ranks)},
		}
		if err := json.Unmarshal([]byte(craftedPlacement(ranks, layers, experts)), p.Placement); err != nil {
			t.Fatal(err)
		}
		artifact, err := plan.Encode(p)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "plan")
		if err := plan.Write(dir, artifact, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		trace := clitest.WriteFile(t, "trace.safetensors", string(clitest.CraftedTrace(test.requests, layers, experts, 1, vocabulary)))
		t.Run(strconv.Itoa(layers)+" layers", func(t *testing.T) {
			clitest.RunInLittleMemory(t, test.refusal, "eval", "--plan", dir, "--trace", trace, "--requests", "all")
		})
	}
}
