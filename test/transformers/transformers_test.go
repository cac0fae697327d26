// SPDX-License-Identifier: Apache-2.0

package transformers

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/python"
)

var interpreter = flag.String("python", "", "Python interpreter with PyTorch, transformers and accelerate; the tests are skipped without it")

const (
	tinyModel = "../../internal/refengine/testdata/tiny-qwen3moe"
	tokenizer = "../vllm/checkpoint/tokenizer_config.json"
)

// goldenCases are the prompts of the small model, and what an independent implementation computes for them.
type goldenCases struct {
	Cases []struct {
		Text           string      `json:"text"`
		PromptIDs      []int32     `json:"prompt_ids"`
		ExpertsByLayer [][][]int32 `json:"experts_by_layer"` // [layer][token][top]
	} `json:"cases"`
}

func readJSON[T any](t *testing.T, path string) (value T) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return value
}

func writeJSON(t *testing.T, path string, values ...any) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, value := range values {
		if err := json.NewEncoder(file).Encode(value); err != nil {
			t.Fatal(err)
		}
	}
}

func link(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// semmoe runs the command profile, and returns its error output if it fails.
func semmoe(t *testing.T, args ...string) (failure string, code int) {
	t.Helper()
	program, err := programs.Built("semmoe")
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), program, append([]string{"profile", "--backend=Transformers", "--python=" + *interpreter}, args...)...)
	out, err := command.CombinedOutput()
	if err == nil {
		return "", 0
	}
	return string(out), command.ProcessState.ExitCode()
}

// record returns the trace of a model for a data set.
func record(t *testing.T, model, dataset string, args ...string) *trace.Trace {
	t.Helper()
	out := filepath.Join(t.TempDir(), "trace.safetensors.zst")
	args = append(args, "--model-path="+model, "--dataset="+dataset, "--out="+out, "--recorder-arg=--dtype=float32")
	if failure, code := semmoe(t, args...); code != 0 {
		t.Fatalf("exit code %d: %s", code, failure)
	}
	recorded, err := trace.Open(t.Context(), out)
	if err != nil {
		t.Fatal(err)
	}
	return recorded
}

// compare checks the experts of each request, [layer][token][top].
func compare(t *testing.T, recorded *trace.Trace, request int, want [][][]int32) {
	t.Helper()
	layers, top := len(recorded.Model.Layers), recorded.Model.TopK
	if len(want) != layers {
		t.Fatalf("the trace has %d MoE layers, want %d", layers, len(want))
	}
	first := int(recorded.Offsets[request])
	for token := range recorded.Request(request) {
		for layer := range layers {
			at := ((first+token)*layers + layer) * top
			var got []int32
			for _, expert := range recorded.Experts[at : at+top] {
				got = append(got, int32(expert))
			}
			if !slices.Equal(got, want[layer][token]) {
				t.Fatalf("request %d, token %d, MoE layer %d: experts %v, want %v", request, token, layer, got, want[layer][token])
			}
		}
	}
}

// prepare returns the golden cases, the small model with its tokenizer, and a data set with their prompts.
func prepare(t *testing.T) (g goldenCases, model, dataset string) {
	t.Helper()
	if *interpreter == "" {
		t.Skip("-args -python names no interpreter: make test-transformers")
	}
	dir := t.TempDir()
	model, dataset = filepath.Join(dir, "model"), filepath.Join(dir, "requests.jsonl")
	if err := os.CopyFS(model, os.DirFS(tinyModel)); err != nil {
		t.Fatal(err)
	}
	link(t, tokenizer, filepath.Join(model, "tokenizer_config.json"))
	g = readJSON[goldenCases](t, filepath.Join(tinyModel, "golden.json"))
	var lines []any
	for _, c := range g.Cases {
		lines = append(lines, map[string]string{"prompt": c.Text})
	}
	writeJSON(t, dataset, lines...)
	return g, model, dataset
}

// TestGolden checks the token IDs and experts of every golden prompt, in memory and offloaded to disk, with all requests
// in one pass and in several.
func TestGolden(t *testing.T) {
	g, model, dataset := prepare(t)
	for name, args := range map[string][]string{
		"in memory": nil,
		"offloaded": {"--recorder-arg=--memory-bytes=1000000", "--recorder-arg=--offload-dir=" + t.TempDir(), "--recorder-arg=--in-flight=4"},
	} {
		t.Run(name, func(t *testing.T) {
			recorded := record(t, model, dataset, args...)
			if recorded.Requests() != len(g.Cases) {
				t.Fatalf("%d requests, want %d", recorded.Requests(), len(g.Cases))
			}
			for r, c := range g.Cases {
				if diff := cmp.Diff(c.PromptIDs, recorded.Request(r)); diff != "" {
					t.Fatalf("request %d: tokens (-want +got):\n%s", r, diff)
				}
				compare(t, recorded, r, c.ExpertsByLayer)
			}
		})
	}
}

// TestSampling checks that the limits of requests and tokens hold, that chats are recorded by the chat template, and
// that the domains and lines of the data set are in the trace.
func TestSampling(t *testing.T) {
	g, model, dataset := prepare(t)
	var lines []any
	for _, c := range g.Cases {
		lines = append(lines, map[string]any{"messages": []map[string]string{{"role": "user", "content": c.Text}}, "domain": "chat"}, map[string]any{"prompt": c.Text, "domain": "text"})
	}
	writeJSON(t, dataset, lines...)
	recorded := record(t, model, dataset, "--requests=10", "--tokens=200", "--request-tokens=30")
	if !slices.Equal(recorded.Model.Domains, []string{"chat", "text"}) && len(recorded.Model.Domains) != 1 {
		t.Errorf("domains %v", recorded.Model.Domains)
	}
	if len(recorded.Tokens) < 200 || len(recorded.Tokens) >= 230 || recorded.Requests() > 10 {
		t.Errorf("%d tokens of %d requests", len(recorded.Tokens), recorded.Requests())
	}
	for r := range recorded.Requests() {
		line := int(recorded.Documents[r])
		ids := recorded.Request(r)
		if want := g.Cases[(line-1)/2].PromptIDs; line%2 == 0 && !slices.Equal(ids, want[:min(len(want), 30)]) {
			t.Errorf("line %d: tokens %v, want %v", line, ids, want)
		} else if line%2 == 1 && slices.Equal(ids, want[:min(len(want), 30)]) {
			t.Errorf("line %d: the chat template is not applied", line)
		}
	}
}

// TestFamilies checks the experts of random checkpoints of many families against gates that families.py computes.
func TestFamilies(t *testing.T) {
	g, model, _ := prepare(t)
	dir := t.TempDir()
	var prompts, lines []any
	for _, c := range g.Cases[:3] {
		prompts, lines = append(prompts, c.PromptIDs), append(lines, map[string]string{"prompt": c.Text})
	}
	dataset, ids := filepath.Join(dir, "requests.jsonl"), filepath.Join(dir, "prompts.json")
	writeJSON(t, dataset, lines...)
	writeJSON(t, ids, prompts)
	python.Run(t, *interpreter, "families.py", dir, ids)
	families, err := filepath.Glob(filepath.Join(dir, "*", "golden.json"))
	if err != nil || len(families) < 6 {
		t.Fatalf("%d families, error %v", len(families), err)
	}
	for _, path := range families {
		family := filepath.Dir(path)
		t.Run(filepath.Base(family), func(t *testing.T) {
			for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
				link(t, filepath.Join(model, name), filepath.Join(family, name))
			}
			want := readJSON[[][][][]int32](t, path) // [layer][request][token][top]
			recorded := record(t, family, dataset)
			used := map[int32]bool{}
			for r := range recorded.Requests() {
				var byLayer [][][]int32
				for _, layer := range want {
					byLayer = append(byLayer, layer[r])
					for _, experts := range layer[r] {
						used[experts[0]] = true
					}
				}
				compare(t, recorded, r, byLayer)
			}
			if len(used) < 3 {
				t.Errorf("the golden tokens only activate %v first: the checkpoint does not test the order", slices.Sorted(maps.Keys(used)))
			}
		})
	}
}

// TestFailures checks that each failure has its message and exit code.
func TestFailures(t *testing.T) {
	_, model, dataset := prepare(t)
	common := []string{"--model-path=" + model, "--dataset=" + dataset, "--out=" + filepath.Join(t.TempDir(), "t.safetensors")}
	broken := filepath.Join(t.TempDir(), "broken")
	if err := os.CopyFS(broken, os.DirFS(model)); err != nil {
		t.Fatal(err)
	}
	config := readJSON[map[string]any](t, filepath.Join(broken, "config.json"))
	config["architectures"], config["model_type"] = nil, "kimi_k2"
	writeJSON(t, filepath.Join(broken, "config.json"), config)
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"too little memory":            {append(common, "--recorder-arg=--memory-bytes=1000000"), 4, "provide more memory, or --offload-dir"},
		"unknown flag":                 {append(common, "--recorder-arg=--depth=3"), 3, "the recorder did not start"},
		"no interpreter":               {append(common, "--python=/nonexistent"), 3, "--python"},
		"flag of the other backend":    {append(common, "--concurrency=3"), 3, "--concurrency has no effect"},
		"type unknown to transformers": {append(slices.Clone(common[1:]), "--model-path="+broken), 4, "kimi_k2"},
	} {
		t.Run(name, func(t *testing.T) {
			failure, code := semmoe(t, slices.Clone(c.args)...)
			if code != c.code || !strings.Contains(failure, c.want) {
				t.Errorf("exit code %d, want %d with %q:\n%s", code, c.code, c.want, failure)
			}
		})
	}
}
