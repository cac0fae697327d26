package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A named pipe without a writer blocks its reader. Every flag that names a file refuses one.
func TestFlagsRefuseNamedPipes(t *testing.T) {
	dir := t.TempDir()
	pipe, plan := filepath.Join(dir, "pipe.json"), filepath.Join(dir, "plan")
	checkpoint := filepath.Join(dir, "checkpoint")
	if err := errors.Join(syscall.Mkfifo(pipe, 0o600), os.Mkdir(plan, 0o700), syscall.Mkfifo(filepath.Join(plan, "manifest.json"), 0o600),
		os.Mkdir(checkpoint, 0o700), syscall.Mkfifo(filepath.Join(checkpoint, "config.json"), 0o600)); err != nil {
		t.Fatal(err)
	}
	out, solve := filepath.Join(dir, "out"), "--trace "+sampleTrace+" --ep 4 --attention dp --out "
	for _, line := range []string{
		"stats --trace PIPE",
		"solve --ep 4 --attention dp --out OUT --trace PIPE",
		"solve " + solve + "OUT --current PLAN",
		"solve " + strings.Replace(solve, "dp", "tp", 1) + "OUT --embeddings PIPE",
		"replan --trace PIPE --current PLAN --out OUT",
		"replan --trace " + sampleTrace + " --current PLAN --out OUT",
		"eval --plan PLAN --trace " + sampleTrace,
		"drift --plan PLAN --trace " + sampleTrace,
		"compare --trace PIPE --ep 4",
		"simulate --trace PIPE --ep 4",
		"simulate --trace " + sampleTrace + " --ep 4 --hardware PIPE",
		"lookahead --trace PIPE --model-path CHECKPOINT --out OUT",
		"report --plan PLAN --out OUT",
		"pipeline --ranks 4 --hardware PIPE --model-path CHECKPOINT",
		"pipeline --ranks 4 --model-path PIPE",
		"pipeline --ranks 4 --model-path CHECKPOINT",
		"fit --measurements PIPE --name x --out OUT",
		"calibrate --from-log PIPE --out OUT",
		"verify --plan-dir PLAN --model-path CHECKPOINT --expert-parallel-size 4",
		"inspect --model-path CHECKPOINT",
		"inspect --model-path ../../internal/refengine/testdata/tiny-qwen3moe --dataset PIPE",
		"profile --endpoint http://127.0.0.1:1 --model-path ../../internal/refengine/testdata/tiny-qwen3moe --dataset PIPE --out OUT.safetensors",
		"probe --address http://127.0.0.1:1 --model-name m --ranks 2 --listen 127.0.0.1:0 --answers PIPE",
		"report --plan " + dir + " --out PIPE",
	} {
		arguments := strings.Fields(strings.NewReplacer("PIPE", pipe, "PLAN", plan, "CHECKPOINT", checkpoint, "OUT", out).Replace(line))
		t.Run(line, func(t *testing.T) {
			root := newRootCommand()
			root.SetArgs(arguments)
			root.SetOut(io.Discard)
			root.SetErr(io.Discard)
			if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "a named pipe") && !strings.Contains(err.Error(), "not a regular file") {
				t.Errorf("%v", err)
			}
		})
	}
}
