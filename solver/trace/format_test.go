// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

const sample = "../testdata/tiny-32e-top4.safetensors.zst"

func TestReadRealTrace(t *testing.T) {
	got, err := trace.Open(t.Context(), sample)
	if err != nil {
		t.Fatal(err)
	}
	m := got.Model
	if m.Experts != 32 || m.TopK != 4 || m.Vocabulary != 4096 || m.HiddenLayers != 4 || m.HiddenSize != 128 || len(m.Domains) != 15 {
		t.Errorf("model %+v", m)
	}
	if diff := cmp.Diff([]int{0, 1, 2, 3}, m.Layers); diff != "" {
		t.Error(diff)
	}
	if got.Requests() != 86 || len(got.Tokens) != 38442 {
		t.Errorf("%d requests of %d tokens", got.Requests(), len(got.Tokens))
	}
}

func TestDigestIgnoresCompression(t *testing.T) {
	original := tracetest.Generate(tracetest.Small, 1)
	var digests [][32]byte
	for _, name := range []string{"a.safetensors", "a.safetensors.zst"} {
		path := filepath.Join(t.TempDir(), name)
		if err := trace.Create(path, original); err != nil {
			t.Fatal(err)
		}
		read, err := trace.Open(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, read.Digest)
	}
	if digests[0] != digests[1] || digests[0] == [32]byte{} {
		t.Errorf("digests %x and %x; want equal ones", digests[0], digests[1])
	}
}

// edited returns a small trace file with a changed header.
func edited(t *testing.T, change func(header, metadata map[string]any)) []byte {
	t.Helper()
	var plain bytes.Buffer
	if err := trace.Write(&plain, tracetest.Generate(tracetest.Small, 1)); err != nil {
		t.Fatal(err)
	}
	content := plain.Bytes()
	length := binary.LittleEndian.Uint64(content)
	var header map[string]any
	if err := json.Unmarshal(content[8:8+length], &header); err != nil {
		t.Fatal(err)
	}
	change(header, header["__metadata__"].(map[string]any))
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(out, text...), content[8+length:]...)
}

func TestReadRefusesBadHeaders(t *testing.T) {
	metadata := func(key, value string) func(_, m map[string]any) {
		return func(_, m map[string]any) { m[key] = value }
	}
	tensor := func(name, key, value string) func(h, _ map[string]any) {
		return func(h, _ map[string]any) { h[name].(map[string]any)[key] = value }
	}
	for name, test := range map[string]struct {
		change func(header, metadata map[string]any)
		want   string
	}{
		"missing tensor": {func(h, _ map[string]any) { h["other"] = h["input_ids"]; delete(h, "input_ids") }, `"input_ids" is missing`},
		"wrong dtype":    {tensor("request_document", "dtype", "U32"), "allowed is [I32]"},
		"wrong size":     {tensor("input_ids", "dtype", "I32"), "data_offsets hold"},
		"unknown dtype":  {tensor("input_ids", "dtype", "Q4"), `unknown dtype "Q4"`},
		"half a look-ahead": {func(h, _ map[string]any) {
			domain := h["request_domain"].(map[string]any)
			domain["shape"] = append(domain["shape"].([]any), 1, 1)
			h["lookahead_experts"] = domain
			delete(h, "request_domain")
		}, "must both be present"},
		"hole":                  {func(h, _ map[string]any) { delete(h, "request_document") }, "begins at byte"},
		"no metadata":           {func(h, _ map[string]any) { delete(h, "__metadata__") }, "num_experts is missing"},
		"metadata no number":    {metadata("vocab_size", "many"), `vocab_size is "many"`},
		"expert out of range":   {metadata("num_experts", "5"), "allowed is 0 to 4"},
		"token out of range":    {metadata("vocab_size", "10"), "the vocabulary allows 0 to 9"},
		"top-k of other shape":  {metadata("num_experts_per_tok", "3"), "need [tokens, 3, 3]"},
		"layers of other shape": {metadata("num_moe_layers", "2"), "routed_experts has shape"},
		"too many experts":      {metadata("num_experts", "100000"), "allowed is 1 to 65536"},
		"many ids of layers":    {metadata("vocab_size", "16000000"), "vocab_size is 16000000; allowed is 1 to 1048576"},
		"layers not ascending":  {metadata("moe_layers", "[1,1,2]"), "not an ascending list"},
		"layers not complete":   {metadata("moe_layers", "[1,2]"), "lists 2 layers"},
		"layer beyond model":    {metadata("moe_layers", "[1,2,9]"), "between 0 and 3"},
		"config no JSON":        {metadata("model_config", "{"), "model_config is not the JSON"},
		"domains no list":       {metadata("domains", "{}"), "domains is not a JSON list"},
		"too many domains":      {metadata("domains", `["a"`+strings.Repeat(`,"b"`, 256)+"]"), "domains has 257 entries; the type U8 of request_domain allows 256"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := trace.Read(bytes.NewReader(edited(t, test.change)), trace.MaxBytes)
			if !trace.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v; want an invalid trace with %q", err, test.want)
			}
		})
	}
}

func TestReadRefusesDamagedFiles(t *testing.T) {
	compressed, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(compressed)
	flipped[len(flipped)/2] ^= 0x10
	for name, test := range map[string]struct {
		content []byte
		limit   int64
		want    string
	}{
		"empty":                {nil, trace.MaxBytes, "truncated within the length"},
		"text":                 {[]byte("not a trace, but long enough"), trace.MaxBytes, "not a safetensors file"},
		"huge header":          {binary.LittleEndian.AppendUint64(nil, 1<<40), trace.MaxBytes, "not a safetensors file"},
		"compressed, cut":      {compressed[:len(compressed)/2], trace.MaxBytes, ""},
		"compressed, damaged":  {flipped, trace.MaxBytes, ""},
		"compressed, too long": {compressed, 1000, "the maximum is 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := trace.Read(bytes.NewReader(test.content), test.limit)
			if !trace.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v; want an invalid trace with %q", err, test.want)
			}
		})
	}
}

// Solving allocates counts by token id, by pair of experts, and by request and expert, independent of the content of
// the requests.
func TestReadRefusesManyCounts(t *testing.T) {
	small := tracetest.Generate(tracetest.Small, 1)
	for name, test := range map[string]struct {
		experts, vocabulary, requests int
		refused                       bool
	}{
		"large model":            {experts: 512, vocabulary: 262_144, requests: 40},
		"most experts":           {experts: 2048, vocabulary: 200, requests: 40},
		"too many experts":       {experts: 2100, vocabulary: 200, requests: 40, refused: true},
		"too many requests":      {experts: 1024, vocabulary: 200, requests: 80_000, refused: true},
		"largest vocabulary":     {experts: 16, vocabulary: 1 << 20, requests: 40},
		"vocabulary and experts": {experts: 2090, vocabulary: 1 << 20, requests: 40, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			crafted := small.Subset(make([]int, test.requests)) // copies of the first request, cut to its first token
			crafted.Model.Experts, crafted.Model.Vocabulary = test.experts, test.vocabulary
			crafted.Model.Layers, crafted.Model.HiddenLayers = []int{0}, 1
			crafted.Tokens, crafted.Domains = crafted.Tokens[:test.requests], nil
			crafted.Experts = slices.Repeat([]uint16{0, 1}, test.requests)
			for r := range crafted.Offsets {
				crafted.Offsets[r] = int64(r)
			}
			err := crafted.Validate()
			if test.refused && (!trace.IsInvalid(err) || !strings.Contains(err.Error(), "counts; allowed are 100663296 for")) || !test.refused && err != nil {
				t.Errorf("error %v", err)
			}
		})
	}
	small.Model.Vocabulary, small.Model.HiddenLayers, small.Model.Layers = 1<<20, 33, nil
	for layer := range small.Model.HiddenLayers {
		small.Model.Layers = append(small.Model.Layers, layer)
	}
	if err := small.Validate(); !trace.IsInvalid(err) || !strings.Contains(err.Error(), "allowed is up to 33554432 token ids in all layers") {
		t.Errorf("the largest vocabulary in 33 layers: error %v", err)
	}
}

// A small compressed file can contain gigabytes; reading stops far below.
func TestReadRefusesLargeExpansion(t *testing.T) {
	const tokens, width = 1 << 22, 3 * 2
	header := fmt.Sprintf(`{"__metadata__":{"num_experts":"16","num_experts_per_tok":"2","num_moe_layers":"3","vocab_size":"200"},`+
		`"request_offsets":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},"request_document":{"dtype":"I32","shape":[1],"data_offsets":[16,20]},`+
		`"input_ids":{"dtype":"U16","shape":[%d],"data_offsets":[20,%d]},"routed_experts":{"dtype":"U16","shape":[%d,3,2],"data_offsets":[%d,%d]}}`,
		tokens, 20+2*tokens, tokens, 20+2*tokens, 20+2*tokens+2*width*tokens)
	var compressed bytes.Buffer
	encoder, err := zstd.NewWriter(&compressed, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range [][]byte{binary.LittleEndian.AppendUint64(nil, uint64(len(header))), []byte(header), make([]byte, 20+2*tokens+2*width*tokens)} {
		if _, err := encoder.Write(part); err != nil {
			t.Fatal(err)
		}
	}
	if err := encoder.Close(); err != nil || compressed.Len() > 20<<10 {
		t.Fatalf("%d bytes, %v", compressed.Len(), err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err = trace.Read(&compressed, trace.MaxBytes)
	runtime.ReadMemStats(&after)
	if !trace.IsInvalid(err) || !strings.Contains(err.Error(), "decompresses to more than 200 times its size") {
		t.Errorf("error %v", err)
	}
	if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 256<<20 {
		t.Errorf("%d bytes were allocated", allocated)
	}
}

func TestOpenRefusesIrregularFiles(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{pipe: "is not a regular file", os.DevNull: "is not a regular file", dir: "is a directory"} {
		if _, err := trace.Open(t.Context(), path); !trace.IsInvalid(err) || !strings.Contains(err.Error(), path+": "+want) {
			t.Errorf("error %v; want %q", err, want)
		}
	}
}

type failingReader struct{ content *bytes.Reader }

var errDisk = errors.New("disk gone")

func (r failingReader) Read(p []byte) (int, error) {
	if r.content.Len() == 0 {
		return 0, errDisk
	}
	return r.content.Read(p)
}

func TestReadErrorIsNotInvalid(t *testing.T) {
	compressed, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	_, err = trace.Read(failingReader{bytes.NewReader(compressed[:len(compressed)/2])}, trace.MaxBytes)
	if err == nil || trace.IsInvalid(err) {
		t.Errorf("error %v; want an error other than *InvalidError", err)
	}
}

func TestLayersFromModelConfig(t *testing.T) {
	for name, test := range map[string]struct {
		config  string
		want    []int
		message string
	}{
		"none":           {``, []int{0, 1, 2}, ""},
		"last layers":    {`{"num_hidden_layers":5}`, []int{2, 3, 4}, ""},
		"first dense":    {`{"num_hidden_layers":4,"first_k_dense_replace":1}`, []int{1, 2, 3}, ""},
		"frequency":      {`{"num_hidden_layers":6,"first_k_dense_replace":0,"moe_layer_freq":2}`, []int{0, 2, 4}, ""},
		"frequency list": {`{"num_hidden_layers":5,"moe_layer_freq":[0,1,0,1,1]}`, []int{1, 3, 4}, ""},
		"sparse step":    {`{"num_hidden_layers":6,"decoder_sparse_step":2}`, []int{1, 3, 5}, ""},
		"dense only":     {`{"num_hidden_layers":5,"decoder_sparse_step":1,"mlp_only_layers":[0,3]}`, []int{1, 2, 4}, ""},
		"in a wrapper":   {`{"model_type":"kimi_vl","text_config":{"num_hidden_layers":4,"first_k_dense_replace":1}}`, []int{1, 2, 3}, ""},
		"in two":         {`{"thinker_config":{"text_config":{"num_hidden_layers":4,"first_k_dense_replace":1}}}`, []int{1, 2, 3}, ""},
		"of InternVL":    {`{"llm_config":{"num_hidden_layers":4,"first_k_dense_replace":1}}`, []int{1, 2, 3}, ""},
		"of DeepSeek":    {`{"num_hidden_layers":null,"language_config":{"num_hidden_layers":4,"first_k_dense_replace":1}}`, []int{1, 2, 3}, ""},
		"of Python":      {`{"num_hidden_layers":5,"time_step_limit":[0.0,Infinity],"min":-Infinity,"nan":NaN}`, []int{2, 3, 4}, ""},
		"both set":       {`{"num_hidden_layers":4,"text_config":{"num_hidden_layers":9}}`, []int{1, 2, 3}, ""},
		"no wrapper":     {`{"num_hidden_layers":4,"text_config":null}`, []int{1, 2, 3}, ""},
		"wrong number":   {`{"num_hidden_layers":5,"first_k_dense_replace":1}`, nil, "describes 4 MoE layers"},
		"too many":       {`{"num_hidden_layers":2}`, nil, "2 layers in all"},
		"bad frequency":  {`{"num_hidden_layers":5,"moe_layer_freq":"all"}`, nil, "moe_layer_freq is"},
		"frequency of 0": {`{"num_hidden_layers":5,"moe_layer_freq":0}`, nil, "must be at least 1"},
		"absurd width":   {`{"num_hidden_layers":4,"hidden_size":1000000000}`, nil, "hidden_size is 1000000000; allowed is 1 to 1048576"},
		"absurd layers":  {`{"num_hidden_layers":1000000000}`, nil, "num_hidden_layers is 1000000000"},
	} {
		t.Run(name, func(t *testing.T) {
			content := edited(t, func(_, metadata map[string]any) {
				delete(metadata, "moe_layers")
				metadata["model_config"] = test.config
			})
			got, err := trace.Read(bytes.NewReader(content), trace.MaxBytes)
			if test.message != "" {
				if !trace.IsInvalid(err) || !strings.Contains(err.Error(), test.message) {
					t.Errorf("error %v; want %q", err, test.message)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got.Model.Layers); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSplitReachesThePercentageInEveryDomain(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for _, percent := range []int{1, 20, 50, 99} {
		train, _, err := trace.Split(tr, percent, 7)
		if err != nil {
			t.Fatal(err)
		}
		count := map[uint8]int{}
		for _, r := range train {
			count[tr.Domains[r]]++
		}
		// A domain has 6 documents of 2 requests; the last document stays in test.
		want := min((percent*12+199)/200*2, 10)
		for domain := range uint8(4) {
			if count[domain] != want {
				t.Errorf("%d%%: domain %d has %d train requests; want %d", percent, domain, count[domain], want)
			}
		}
	}
}
