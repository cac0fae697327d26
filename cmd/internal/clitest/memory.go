// SPDX-License-Identifier: Apache-2.0

package clitest

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
)

// maxResident is the limit of the resident memory of a command that reads a crafted trace of a few KiB.
const maxResident = 512 << 20

// CraftedTrace returns a trace of requests that each have one token, token 0, with experts 0 to topK-1 in every layer.
func CraftedTrace(requests, layers, experts, topK, vocabulary int) []byte {
	metadata := map[string]string{}
	for key, n := range map[string]int{"num_experts": experts, "num_experts_per_tok": topK, "num_moe_layers": layers, "vocab_size": vocabulary} {
		metadata[key] = strconv.Itoa(n)
	}
	header := map[string]any{"__metadata__": metadata}
	var data []byte
	add := func(name, dtype string, begin int, shape ...int) {
		header[name] = map[string]any{"dtype": dtype, "shape": shape, "data_offsets": []int{begin, len(data)}}
	}
	for r := range requests + 1 {
		data = binary.LittleEndian.AppendUint64(data, uint64(r))
	}
	add("request_offsets", "I64", 0, requests+1)
	begin := len(data)
	for r := range requests {
		data = binary.LittleEndian.AppendUint32(data, uint32(r))
	}
	add("request_document", "I32", begin, requests)
	begin = len(data)
	data = append(data, make([]byte, 2*requests)...)
	add("input_ids", "U16", begin, requests)
	begin = len(data)
	for range requests * layers {
		for k := range topK {
			data = binary.LittleEndian.AppendUint16(data, uint16(k))
		}
	}
	add("routed_experts", "U16", begin, requests, layers, topK)
	text, err := json.Marshal(header)
	if err != nil {
		panic(err) // maps of numbers and strings are valid JSON
	}
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), data...)
}

// RunInLittleMemory runs a command, which succeeds or reports its input as invalid with a message, and reads the
// maximum resident memory of the finished process.
func RunInLittleMemory(t *testing.T, refusal string, args ...string) {
	t.Helper()
	process := exec.Command(os.Args[0], args...)
	process.Env = append(os.Environ(), asCommand+"=1", "GOGC=100")
	output, err := process.CombinedOutput()
	used := process.ProcessState.SysUsage().(*syscall.Rusage).Maxrss << 10
	t.Logf("%d MiB of resident memory", used>>20)
	if used > maxResident {
		t.Errorf("%d MiB of resident memory", used>>20)
	}
	switch code := process.ProcessState.ExitCode(); {
	case refusal == "" && err != nil:
		t.Errorf("%v: %.1000s", err, output)
	case refusal != "" && (code != cli.ExitInvalidFile || !strings.Contains(string(output), refusal)):
		t.Errorf("exit code %d: %.1000s", code, output)
	}
}
