// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/clitest"
)

// Every flag that names a file refuses a named pipe.
func TestFlagsRefuseNamedPipes(t *testing.T) {
	solve := "--trace " + clitest.SampleTrace + " --ep 4 --attention dp --out "
	clitest.CheckNamedPipes(t, newRootCommand,
		"solve --ep 4 --attention dp --out OUT --trace PIPE",
		"solve "+solve+"OUT --current PLAN",
		"solve "+strings.Replace(solve, "dp", "tp", 1)+"OUT --embeddings PIPE",
		"replan --trace PIPE --current PLAN --out OUT",
		"replan --trace "+clitest.SampleTrace+" --current PLAN --out OUT",
		"eval --plan PLAN --trace "+clitest.SampleTrace,
		"report --plan PLAN --out OUT",
		"calibrate --from-log PIPE --out OUT",
		"verify --plan-dir PLAN --model-path CHECKPOINT --expert-parallel-size 4",
		"inspect --model-path CHECKPOINT",
		"inspect --model-path ../../internal/refengine/testdata/tiny-qwen3moe --dataset PIPE",
		"profile --endpoint http://127.0.0.1:1 --model-path ../../internal/refengine/testdata/tiny-qwen3moe --dataset PIPE --out OUT.safetensors",
		"probe --address http://127.0.0.1:1 --model-name m --ranks 2 --listen 127.0.0.1:0 --answers PIPE",
		"report --plan . --out PIPE",
		"solve "+solve+"OUT --hardware PIPE",
		"reshuffle --model ../../internal/refengine/testdata/tiny-qwen3moe --permutation PIPE --out OUT",
		"router --backends PIPE",
		"router --backends http://127.0.0.1:1 --engine SGLang --tls-cert-file PIPE --tls-key-file PIPE",
		"router --backends http://127.0.0.1:1 --engine SGLang --engine-api-key-file PIPE",
		"router --backends http://127.0.0.1:1 --engine SGLang --engine-tls-ca-file PIPE",
		"router --backends http://127.0.0.1:1 --engine SGLang --api-keys-dir PLAN",
		"router --backends http://127.0.0.1:1 --engine SGLang --default-plan-dir PLAN",
	)
}
