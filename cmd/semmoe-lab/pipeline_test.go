// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
)

// The sizes of DeepSeek-V2.
const latentModel = `{"model_type": "deepseek_v2", "num_hidden_layers": 60, "hidden_size": 5120, "vocab_size": 102400, "num_attention_heads": 128,
	"num_key_value_heads": 128, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3,
	"intermediate_size": 12288, "moe_intermediate_size": 1536, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}`

func latentModelDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(latentModel), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPipelinePrintsSchedules(t *testing.T) {
	dir := latentModelDir(t)
	gantt := filepath.Join(t.TempDir(), "gantt.svg")
	args := []string{"--model-path", dir, "--batch", "4", "--sequence", "2048,4096", "--gantt", gantt}
	code, text, message := clitest.Run(t, newPipelineCommand(), args...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	for _, want := range []string{"hardware profile h200-nvlink", "59 MoE layers, 160 experts, top-6, on 8 ranks", "\n2048 ", "\n4096 ", "OVER PPPIPE"} {
		if !strings.Contains(text, want) {
			t.Errorf("the output does not contain %q:\n%s", want, text)
		}
	}
	if svg, err := os.ReadFile(gantt); err != nil || !bytes.HasPrefix(svg, []byte("<svg ")) || !bytes.Contains(svg, []byte("2048 tokens")) {
		t.Errorf("the drawing is %.60s, error %v", svg, err)
	}
	code, text, message = clitest.Run(t, newPipelineCommand(), append(args, "-o", "json", "--top-k", "5")...)
	var report pipelineReport
	if code != 0 || json.Unmarshal([]byte(text), &report) != nil {
		t.Fatalf("exit code %d: %s%s", code, message, text)
	}
	if report.Shape.TopK != 5 || report.Shape.KVRank != 512 || report.Shape.SharedSize != 3072 || len(report.Lengths) != 2 {
		t.Errorf("the report is of %+v, %d lengths", report.Shape, len(report.Lengths))
	}
	for _, s := range report.Lengths {
		if s.OverPPPipe < 1-1e-9 || s.OverNaive < s.OverPPPipe || s.Plan.TokensPerSecond > s.BoundTokensPerSecond*(1+1e-9) || s.Plan.AttentionRanks+s.Plan.ExpertRanks != 8 {
			t.Errorf("length %d: %+v", s.Sequence, s)
		}
	}
}

// Ranks of several nodes exchange over network cards, which takes longer than within a node.
func TestPipelineOfSeveralNodes(t *testing.T) {
	var throughputs []float64
	for _, perNode := range []string{"16", "8"} {
		code, text, message := clitest.Run(t, newPipelineCommand(), "--model-path", latentModelDir(t), "--ranks", "16", "--ranks-per-node", perNode, "--batch", "1", "--sequence", "2048", "-o", "json")
		var report pipelineReport
		if code != 0 || json.Unmarshal([]byte(text), &report) != nil {
			t.Fatalf("exit code %d: %s%s", code, message, text)
		}
		throughputs = append(throughputs, report.Lengths[0].Naive.TokensPerSecond)
	}
	if throughputs[1] >= throughputs[0] {
		t.Errorf("%v tokens per second on one node, %v on two", throughputs[0], throughputs[1])
	}
}

// Adaptive schedules for the lengths of a stream are compared with constant ones.
func TestPipelineComparesAStream(t *testing.T) {
	stream := filepath.Join(t.TempDir(), "lengths.txt")
	if err := os.WriteFile(stream, []byte("500\n512\n1000\n\n 2000 \n4000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--model-path", latentModelDir(t), "--batch", "4", "--sequence", "2048", "--stream", stream}
	code, text, message := clitest.Run(t, newPipelineCommand(), args...)
	if code != 0 || !strings.Contains(text, "5 batches of 4 lengths, mean 1638 tokens") || !strings.Contains(text, "times that of the best constant schedule, for ") {
		t.Errorf("exit code %d: %s%s", code, message, text)
	}
	code, text, message = clitest.Run(t, newPipelineCommand(), append(args, "-o", "json")...)
	var report pipelineReport
	if code != 0 || json.Unmarshal([]byte(text), &report) != nil {
		t.Fatalf("exit code %d: %s%s", code, message, text)
	}
	s := report.Stream
	if s == nil || s.Batches != 5 || s.Lengths != 4 || s.Adaptive.TokensPerSecond < s.Fixed.TokensPerSecond || s.Fixed.TokensPerSecond < s.Mean.TokensPerSecond || s.Mean.Sequence != 2048 {
		t.Errorf("the stream is %+v", s)
	}
	if e := report.Lengths[0].Exposed; !(e.Naive > 0) || e.Plan > e.Naive || e.PPPipe > e.Naive || e.Naive >= 1 {
		t.Errorf("exposed are %+v", e)
	}
	for text, want := range map[string]string{
		"12\nmany\n": `line 2 is "many"; it must be a number of tokens`, "0\n": "line 1 is", " \n": "the file is empty", sequenceOf(257): "257 different lengths",
	} {
		if err := os.WriteFile(stream, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if code, _, message := clitest.Run(t, newPipelineCommand(), args...); code != cli.ExitInvalidFile || !strings.Contains(message, want) {
			t.Errorf("exit code %d, %q; want %q", code, message, want)
		}
	}
	if code, _, message := clitest.Run(t, newPipelineCommand(), append(args, "--stream", stream+".none")...); code != cli.ExitInvalidFile || !strings.Contains(message, "--stream") {
		t.Errorf("exit code %d, %q", code, message)
	}
}

// sequenceOf returns n different lengths.
func sequenceOf(n int) string {
	var lines strings.Builder
	for i := range n {
		fmt.Fprintln(&lines, (i+1)*streamStep)
	}
	return lines.String()
}

// A shape needs no checkpoint, and user-provided profiles are supported.
func TestPipelineFromFlags(t *testing.T) {
	profile := filepath.Join(t.TempDir(), "mine.json")
	if code, _, message := clitest.Run(t, newFitCommand(), "--measurements", clitest.MeasuredTimes, "--name", "mine", "--memory-gib", "80", "--out", profile); code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	code, text, message := clitest.Run(t, newPipelineCommand(), "--hardware", profile, "--layers", "16", "--moe-layers", "16", "--experts", "64", "--top-k", "8", "--hidden", "2048",
		"--expert-size", "1024", "--heads", "16", "--kv-heads", "16", "--query-dim", "128", "--value-dim", "128", "--ranks", "4", "--sequence", "512")
	if code != 0 || !strings.Contains(text, "profile mine: 16 MoE layers") {
		t.Errorf("exit code %d: %s%s", code, message, text)
	}
}

func TestPipelineRefuses(t *testing.T) {
	dir := latentModelDir(t)
	dense := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(dense, []byte(`{"model_type": "llama"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no shape":        {nil, cli.ExitUsage, "hidden layers: 0; allowed is 1 to"},
		"a dense model":   {[]string{"--model-path", dense}, cli.ExitInvalidFile, `"llama" is not a known`},
		"no file":         {[]string{"--model-path", dir + "/none"}, cli.ExitInvalidFile, "--model-path"},
		"no profile":      {[]string{"--model-path", dir, "--hardware", "abacus"}, cli.ExitUsage, "there are h200-nvlink"},
		"a foreign file":  {[]string{"--model-path", dir, "--hardware", dense}, cli.ExitInvalidFile, "model_type"},
		"a bad size":      {[]string{"--model-path", dir, "--top-k", "999"}, cli.ExitUsage, "experts of a token: 999; allowed is 1 to 160"},
		"one rank":        {[]string{"--model-path", dir, "--ranks", "1"}, cli.ExitUsage, "ranks: 1; allowed is 2"},
		"no node":         {[]string{"--model-path", dir, "--ranks-per-node", "0"}, cli.ExitUsage, "--ranks-per-node is 0"},
		"no room":         {[]string{"--model-path", dir, "--memory-gib", "16"}, exitNoRoom, "sequence 1024: no split of the ranks has enough memory"},
		"no memory":       {[]string{"--model-path", dir, "--memory-gib", "NaN"}, cli.ExitUsage, "--memory-gib is NaN"},
		"any memory":      {[]string{"--model-path", dir, "--memory-gib", "Inf"}, cli.ExitUsage, "--memory-gib is +Inf"},
		"no length":       {[]string{"--model-path", dir, "--sequence", "0"}, cli.ExitUsage, "0 tokens"},
		"a bad batch":     {[]string{"--model-path", dir, "--batch", "-1"}, cli.ExitUsage, "-1 samples"},
		"a bad dispatch":  {[]string{"--dispatch", "int4"}, cli.ExitUsage, "allowed is bf16, fp8"},
		"a bad output":    {[]string{"--output", "xml"}, cli.ExitUsage, "allowed is text, json"},
		"a bad fraction":  {[]string{"--memory-fraction", "2"}, cli.ExitUsage, "allowed is above 0 to 1"},
		"too many layers": {[]string{"--gantt-layers", "99"}, cli.ExitUsage, "allowed is 1 to 16"},
		"no folder":       {[]string{"--gantt", dir}, cli.ExitUsage, "--gantt: " + dir + " is a directory"},
		"an argument":     {[]string{"what"}, cli.ExitUsage, "what"},
		"a foreign flag":  {[]string{"--colour"}, cli.ExitUsage, "colour"},
	} {
		if code, _, message := clitest.Run(t, newPipelineCommand(), c.args...); code != c.code || !strings.Contains(message, c.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, c.code, c.want)
		}
	}
}
