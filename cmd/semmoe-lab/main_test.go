// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/clitest"
)

func TestMain(m *testing.M) { clitest.Main(m, main) }

func TestHelpOfFlags(t *testing.T) { clitest.CheckHelp(t, newRootCommand()) }

// Every flag that names a file refuses a named pipe.
func TestFlagsRefuseNamedPipes(t *testing.T) {
	clitest.CheckNamedPipes(t, newRootCommand,
		"stats --trace PIPE",
		"drift --plan PLAN --trace "+clitest.SampleTrace,
		"compare --trace PIPE --ep 4",
		"simulate --trace PIPE --ep 4",
		"simulate --trace "+clitest.SampleTrace+" --ep 4 --hardware PIPE",
		"lookahead --trace PIPE --model-path CHECKPOINT --out OUT",
		"pipeline --ranks 4 --hardware PIPE --model-path CHECKPOINT",
		"pipeline --ranks 4 --model-path PIPE",
		"pipeline --ranks 4 --model-path CHECKPOINT",
		"fit --measurements PIPE --name x --out OUT",
	)
}

// Commands on small files whose headers claim a large model, or whose content needs more memory than its size.
func TestSmallInputsNeedLittleMemory(t *testing.T) {
	for name, test := range map[string]struct {
		content []byte
		refusal string
	}{
		"experts":        {clitest.CraftedTrace(4, 1, 1<<16, 1, 100), "counts; allowed are"},
		"short requests": {clitest.CraftedTrace(7000, 1, 8, 1, 100), ""},
		"largest model":  {clitest.CraftedTrace(4, 12, 8, 1, 1<<20), ""}, // by token ids in all layers
	} {
		path := clitest.WriteFile(t, "trace.safetensors", string(test.content))
		t.Run(name, func(t *testing.T) { clitest.RunInLittleMemory(t, test.refusal, "stats", "--trace", path) })
	}
	path := clitest.WriteFile(t, "m.json", `{"grouped_gemm":[{}`+strings.Repeat(",{}", 1<<20)+"]}")
	clitest.RunInLittleMemory(t, "m.json", "fit", "--measurements", path, "--name", "x", "--out", filepath.Join(t.TempDir(), "out.json"))
}
