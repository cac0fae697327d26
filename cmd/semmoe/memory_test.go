package main

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// maxResident is the limit on the resident memory of a command that reads a crafted trace of a few KiB.
const maxResident = 512 << 20

// craftedTrace returns a trace of requests that each have one token, token 0, with experts 0 to topK-1 in every layer.
func craftedTrace(requests, layers, experts, topK, vocabulary int) []byte {
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
		panic(err) // maps of numbers and strings have JSON
	}
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), data...)
}

// TestSmallTracesNeedLittleMemory runs commands on small traces whose header claims a large model, and reads the maximum resident memory of
// each finished process.
func TestSmallTracesNeedLittleMemory(t *testing.T) {
	for name, test := range map[string]struct {
		content []byte
		refusal string
	}{
		"experts":            {craftedTrace(4, 1, 1<<16, 1, 100), "counts; allowed are"},
		"experts of layers":  {craftedTrace(4, 256, 1<<14, 1, 100), "counts; allowed are"},
		"experts of a token": {craftedTrace(4, 1, 1<<14, 1<<13, 100), "counts; allowed are"},
		"requests":           {craftedTrace(7000, 1, 1<<13, 1, 100), "counts; allowed are"},
		"vocabulary":         {craftedTrace(4, 2, 8, 1, 1<<24), "vocab_size is 16777216; allowed is"},
		"ids of layers":      {craftedTrace(4, 4096, 8, 1, 1<<13), "counts; allowed are"},
		"short requests":     {craftedTrace(7000, 1, 8, 1, 100), ""},
		"largest vocabulary": {craftedTrace(4, 1, 8, 1, 1<<20), ""},
	} {
		if len(test.content) > 128<<10 {
			t.Fatalf("%s has %d bytes", name, len(test.content))
		}
		path := filepath.Join(t.TempDir(), "trace.safetensors")
		if err := os.WriteFile(path, test.content, 0o600); err != nil {
			t.Fatal(err)
		}
		for command, args := range map[string][]string{
			"stats": {"stats", "--trace", path},
			"solve": {"solve", "--trace", path, "--ep", "8", "--attention", "dp", "--time-budget", "1s", "--out", filepath.Join(t.TempDir(), "plan")},
		} {
			t.Run(name+"/"+command, func(t *testing.T) {
				process := exec.Command(os.Args[0], args...)
				process.Env = append(os.Environ(), asCommand+"=1")
				output, err := process.CombinedOutput()
				if used := process.ProcessState.SysUsage().(*syscall.Rusage).Maxrss << 10; used > maxResident {
					t.Errorf("%d MiB of resident memory", used>>20)
				}
				switch code := process.ProcessState.ExitCode(); {
				case test.refusal == "" && err != nil:
					t.Errorf("%v: %.1000s", err, output)
				case test.refusal != "" && (code != exitInvalidFile || !strings.Contains(string(output), test.refusal)):
					t.Errorf("exit code %d: %.1000s", code, output)
				}
			})
		}
	}
}
