// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const tinyModel = "../../refengine/testdata/tiny-qwen3moe"

const smallConfig = `{"model_type":"mixtral","num_hidden_layers":1,"num_local_experts":2,"num_experts_per_tok":1,"hidden_size":2,"vocab_size":4}`

func twoTensors(first, second string) []byte {
	return safetensorsBytes(`{"`+first+`":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"`+second+`":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, []byte{1, 2})
}

func oneTensor(name string, value byte) []byte {
	return safetensorsBytes(`{"`+name+`":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, []byte{value})
}

// writeSmall writes a checkpoint of two shards, then applies the changes. nil content deletes a file.
func writeSmall(t *testing.T, changes map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string][]byte{
		configFile:        []byte(smallConfig),
		indexFile:         []byte(`{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}`),
		"one.safetensors": oneTensor("a", 1),
		"two.safetensors": oneTensor("b", 2),
	}
	for name, content := range changes {
		files[name] = content
	}
	for name, content := range files {
		if content != nil {
			writeFile(t, filepath.Join(dir, name), content)
		}
	}
	return dir
}

const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4976698672\n"

// TestOtherFileNames has weights in files with names that transformers does not use. Their content is unambiguous.
func TestOtherFileNames(t *testing.T) {
	index := func(a, b string) []byte { return []byte(`{"weight_map":{"a":"` + a + `","b":"` + b + `"}}`) }
	for name, test := range map[string]struct {
		changes map[string][]byte
		index   string
	}{
		"index of msModelSlim": {map[string][]byte{
			"one.safetensors": nil, "two.safetensors": nil, indexFile: nil,
			"quant_model_weights-00001-of-00002.safetensors": oneTensor("a", 1), "quant_model_weights-00002-of-00002.safetensors": oneTensor("b", 2),
			"quant_model_weights.safetensors.index.json": index("quant_model_weights-00001-of-00002.safetensors", "quant_model_weights-00002-of-00002.safetensors"),
		}, "quant_model_weights.safetensors.index.json"},
		"two files":         {map[string][]byte{indexFile: nil}, ""},
		"numbered files":    {map[string][]byte{indexFile: nil, "m-1-of-2.safetensors": oneTensor("c", 1), "m-2-of-2.safetensors": oneTensor("d", 1)}, ""},
		"one file":          {map[string][]byte{indexFile: nil, "one.safetensors": nil}, ""},
		"next to originals": {map[string][]byte{indexFile: nil, "consolidated.safetensors": oneTensor("a", 1), "adapter_model.safetensors": oneTensor("b", 1)}, ""},
		"usual names first": {map[string][]byte{"x.safetensors.index.json": []byte("{}"), "consolidated.safetensors.index.json": []byte("{}")}, indexFile},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := Open(writeSmall(t, test.changes))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, found := c.Tensor("b"); !found || c.IndexName != test.index {
				t.Errorf("tensor b is found: %t, index %q", found, c.IndexName)
			}
		})
	}
}

// TestOpenSpecialFiles replaces each file that Open reads by a FIFO. Opening a FIFO would block.
func TestOpenSpecialFiles(t *testing.T) {
	for _, name := range []string{configFile, indexFile, "two.safetensors"} {
		dir := writeSmall(t, map[string][]byte{name: nil})
		if err := syscall.Mkfifo(filepath.Join(dir, name), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir); !IsInvalid(err) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		changes map[string][]byte
		want    []string
	}{
		"no config":            {map[string][]byte{configFile: nil}, []string{configFile, "does not exist"}},
		"empty config":         {map[string][]byte{configFile: {}}, []string{configFile, "is empty"}},
		"unknown family":       {map[string][]byte{configFile: []byte(`{"model_type":"bert"}`)}, []string{configFile, `"bert"`, "mixtral"}},
		"no weights":           {map[string][]byte{indexFile: nil, "one.safetensors": nil, "two.safetensors": nil}, []string{"neither model.safetensors.index.json nor model.safetensors"}},
		"broken index":         {map[string][]byte{indexFile: []byte(`{`)}, []string{indexFile, "not a valid index"}},
		"empty index":          {map[string][]byte{indexFile: []byte(`{}`)}, []string{"weight_map is missing or empty"}},
		"index leaves dir":     {map[string][]byte{indexFile: []byte(`{"weight_map":{"a":"../one.safetensors"}}`)}, []string{`"../one.safetensors"`, "next to the index"}},
		"shard missing":        {map[string][]byte{"two.safetensors": nil}, []string{"two.safetensors", "does not exist"}},
		"shard truncated":      {map[string][]byte{"two.safetensors": oneTensor("b", 2)[:61]}, []string{"two.safetensors", "truncated", "61 bytes", "needs 62"}},
		"tensor unknown":       {map[string][]byte{"two.safetensors": oneTensor("c", 2)}, []string{"two.safetensors", `"c"`, "different checkpoints"}},
		"tensor missing":       {map[string][]byte{indexFile: []byte(`{"weight_map":{"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"}}`)}, []string{"two.safetensors", `"c"`}},
		"tensor in two":        {map[string][]byte{"two.safetensors": oneTensor("a", 2)}, []string{`"a" is in both`}},
		"tensor moved":         {map[string][]byte{indexFile: []byte(`{"weight_map":{"a":"two.safetensors","b":"one.safetensors"}}`)}, []string{"one.safetensors", `"a"`, "does not list in this file"}},
		"shard is a log":       {map[string][]byte{"one.safetensors": []byte("version https://git-lfs")}, []string{"one.safetensors", "not a safetensors file"}},
		"index is a pointer":   {map[string][]byte{indexFile: []byte(pointer)}, []string{indexFile, "is a git-lfs pointer", "git lfs pull"}},
		"config is a pointer":  {map[string][]byte{configFile: []byte(pointer)}, []string{configFile, "is a git-lfs pointer"}},
		"shard is a pointer":   {map[string][]byte{"two.safetensors": []byte(pointer)}, []string{"two.safetensors", "is a git-lfs pointer"}},
		"shard is a page":      {map[string][]byte{"two.safetensors": []byte("\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>")}, []string{"two.safetensors", "is a web page"}},
		"config is a page":     {map[string][]byte{configFile: []byte("<HTML lang=en><body>403 Forbidden</body></HTML>")}, []string{configFile, "is a web page"}},
		"index is an error":    {map[string][]byte{indexFile: []byte(`<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>`)}, []string{indexFile, "is a web page"}},
		"two other indices":    {map[string][]byte{indexFile: nil, "a.safetensors.index.json": []byte("{}"), "b.safetensors.index.json": []byte("{}")}, []string{"a.safetensors.index.json and b.safetensors.index.json", "keep one"}},
		"tensor in two files":  {map[string][]byte{indexFile: nil, "two.safetensors": oneTensor("a", 2)}, []string{`"a" is in both`, "one.safetensors", "two.safetensors"}},
		"one of a set":         {map[string][]byte{indexFile: nil, "m-00001-of-00002.safetensors": oneTensor("c", 1)}, []string{"but not m-00002-of-00002.safetensors"}},
		"a set too large":      {map[string][]byte{indexFile: nil, "m-1-of-99999999999999999999.safetensors": oneTensor("c", 1)}, []string{"is one of more than"}},
		"tensor listed twice":  {map[string][]byte{indexFile: []byte(`{"weight_map":{"a":"one.safetensors","b":"two.safetensors","a":"one.safetensors"}}`)}, []string{indexFile, `lists tensor "a" twice`}},
		"one twice, one not":   {map[string][]byte{indexFile: []byte(`{"weight_map":{"a":"one.safetensors","a":"one.safetensors"}}`), "one.safetensors": twoTensors("a", "b"), "two.safetensors": nil}, []string{indexFile, `lists tensor "a" twice`}},
		"two weight maps":      {map[string][]byte{indexFile: []byte(`{"weight_map":{"a":"one.safetensors"},"weight_map":{"b":"two.safetensors"}}`)}, []string{indexFile, "weight_map appears twice"}},
		"text after the index": {map[string][]byte{indexFile: []byte(`{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}} {}`)}, []string{indexFile, "text after the JSON object"}},
		"config in UTF-16":     {map[string][]byte{configFile: []byte("\xff\xfe{\x00}\x00")}, []string{configFile, "byte order mark", "UTF-8"}},
		"index with a mark":    {map[string][]byte{indexFile: []byte("\xef\xbb\xbf{}")}, []string{indexFile, "byte order mark"}},
		"only GGUF":            {map[string][]byte{indexFile: nil, "one.safetensors": nil, "two.safetensors": nil, "m-Q4_K_M.gguf": []byte("GGUF")}, []string{"GGUF (m-Q4_K_M.gguf), which is not supported"}},
		"GGUF without config":  {map[string][]byte{configFile: nil, indexFile: nil, "one.safetensors": nil, "two.safetensors": nil, "m.gguf": []byte("GGUF")}, []string{"no config.json", "GGUF (m.gguf)"}},
		"only PyTorch":         {map[string][]byte{indexFile: nil, "one.safetensors": nil, "two.safetensors": nil, "pytorch_model.bin": []byte("PK")}, []string{"PyTorch's format (pytorch_model.bin)"}},
		"only Mistral":         {map[string][]byte{indexFile: nil, "one.safetensors": nil, "two.safetensors": nil, "consolidated.safetensors": oneTensor("a", 2)}, []string{"Mistral's own format (consolidated.safetensors)"}},
		"shard is GGUF":        {map[string][]byte{"two.safetensors": append([]byte("GGUF\x03\x00\x00\x00"), make([]byte, 99)...)}, []string{"two.safetensors", "is a GGUF file"}},
		"shard is PyTorch":     {map[string][]byte{"two.safetensors": append([]byte("PK\x03\x04"), make([]byte, 99)...)}, []string{"two.safetensors", "is a PyTorch file"}},
		"config unreachable":   {map[string][]byte{configFile: []byte(`[]`)}, []string{configFile, "not a valid model config"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Open(writeSmall(t, test.changes))
			if !IsInvalid(err) {
				t.Fatalf("got %v, want an invalid error", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not mention %q", err, want)
				}
			}
		})
	}
}

func TestOpenRefusesPathsThatAreNotDirectories(t *testing.T) {
	dir := t.TempDir()
	file := writeFile(t, filepath.Join(dir, "file"), []byte("x"))
	for path, want := range map[string]string{
		filepath.Join(dir, "none"): "does not exist",
		file:                       "is a file; use the directory",
		filepath.Join(file, "sub"): "is a file, not a directory",
	} {
		if _, err := Open(path); !IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
}

func TestOpenSingleFileWithoutIndex(t *testing.T) {
	dir := writeSmall(t, map[string][]byte{indexFile: nil, singleShardFile: oneTensor("a", 1)})
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if tensor, ok := c.Tensor("a"); !ok || tensor.DType != "U8" || len(c.Shards) != 1 {
		t.Errorf("got %+v, %v, %d shards", tensor, ok, len(c.Shards))
	}
}

// TestDigest checks that the digest depends on every relevant change and on no other.
func TestDigest(t *testing.T) {
	digestOf := func(changes map[string][]byte) string {
		t.Helper()
		report, err := Inspect(writeSmall(t, changes))
		if err != nil {
			t.Fatal(err)
		}
		return report.ModelDigest
	}
	base := digestOf(nil)
	if again := digestOf(map[string][]byte{"README.md": []byte("x")}); again != base {
		t.Error("a file outside of the model changed the digest")
	}
	for name, changes := range map[string]map[string][]byte{
		"config": {configFile: []byte(smallConfig + " ")},
		"index":  {indexFile: []byte(`{"weight_map":{"b":"two.safetensors","a":"one.safetensors"}}`)},
		"header": {"two.safetensors": safetensorsBytes(`{"b":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}`, []byte{2})},
	} {
		if digestOf(changes) == base {
			t.Errorf("a change of %s did not change the digest", name)
		}
	}
}

func TestInspectTinyModel(t *testing.T) {
	got, err := Inspect(tinyModel)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.ModelDigest) != 64 {
		t.Errorf("digest %q is not a sha256 in hex", got.ModelDigest)
	}
	got.ModelDigest = ""
	want := Report{
		Family: "qwen3_moe", Layers: 4, MoELayers: []int{0, 1, 2, 3}, Experts: 32, ExpertsPerToken: 4, Groups: 1, GroupsPerToken: 1,
		Hidden: 128, Vocab: 4096, DType: "bfloat16", Shards: 3, Bytes: 2741072 + 2747888 + 2327904, TiedEmbeddings: true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestInspectQuantization covers both places in which ModelOpt describes the quantisation: a separate file, and
// config.json in newer versions.
func TestInspectQuantization(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(tinyModel)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "hf_quant_config.json")
	for text, want := range map[string]string{
		`{"producer":{"name":"modelopt","version":"0.33"},"quantization":{"quant_algo":"NVFP4","kv_cache_quant_algo":"FP8"}}`: "modelopt/NVFP4",
		`{"quantization":{"quant_algo":"FP8"}}`: "FP8",
		`{}`:                                    "",
	} {
		writeFile(t, path, []byte(text))
		got, err := Inspect(dir)
		if err != nil || got.Quantization != want {
			t.Errorf("%s: %q, error %v", text, got.Quantization, err)
		}
	}
	writeFile(t, path, []byte(`{`))
	if _, err := Inspect(dir); !IsInvalid(err) || !strings.Contains(err.Error(), "hf_quant_config.json") {
		t.Errorf("error %v", err)
	}
}

// TestReportFitsTerminationMessage checks that the report of the largest model that ParseConfig accepts fits a
// termination message.
func TestReportFitsTerminationMessage(t *testing.T) {
	layers := make([]int, maxLayers)
	for i := range layers {
		layers[i] = i
	}
	text, err := json.Marshal(Report{
		Family: "deepseek_v3", Wrapper: strings.Repeat("\x00", maxWrapper), Layers: maxLayers, MoELayers: layers, Experts: 1 << 16, ExpertsPerToken: 1 << 16, Groups: 1 << 16, GroupsPerToken: 1 << 16,
		Hidden: 1 << 20, Vocab: 1 << 24, DType: strings.Repeat("\x00", 32), Quantization: strings.Repeat("\x00", maxQuantization), Shards: 1 << 30, Bytes: 1 << 62, ModelDigest: strings.Repeat("f", 64),
		Unpermutable: strings.Repeat("f", maxReason-2),
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(text) > 4096 {
		t.Errorf("report of %d bytes", len(text))
	}
}

func TestIOErrorsAreNotInvalid(t *testing.T) {
	f, err := OpenFile(writeFile(t, filepath.Join(t.TempDir(), "x.safetensors"),
		safetensorsBytes(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, make([]byte, 4))))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Truncate(f.Path, 10); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Float32("a"); err == nil || IsInvalid(err) {
		t.Errorf("got %v, want an I/O error", err)
	}
}
