// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// snapshot lists all files below a directory, except links, with their times and contents.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || entry.Type() == fs.ModeSymlink {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		content, err := os.ReadFile(filepath.Join(dir, name))
		files[name] = info.ModTime().Format(time.RFC3339Nano) + digest(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestUnusableOutputPaths(t *testing.T) {
	m := generators["qwen3_moe"](1)
	model, p, dir := m.write(t, 30), m.permutation(m.layers...), t.TempDir()
	empty, file := filepath.Join(dir, "empty"), filepath.Join(dir, "file")
	if err := errors.Join(os.Mkdir(empty, 0o700), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	mustRun(t, Options{Model: model, Permutation: p, Out: empty})
	if _, err := checkpoint.Inspect(empty); err != nil {
		t.Error(err)
	}
	for _, out := range []string{file, filepath.Join(file, "below")} {
		if _, err := Run(t.Context(), Options{Model: model, Permutation: p, Out: out}); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), "is a file, or is below a file") {
			t.Errorf("%s: %v", out, err)
		}
	}
}

func TestSecondRunDoesNothing(t *testing.T) {
	m := generators["qwen3_moe"](1)
	p := m.permutation(m.layers...)
	model := m.write(t, 30)
	out := filepath.Join(t.TempDir(), "out")
	first := mustRun(t, Options{Model: model, Permutation: p, Out: out})
	before := snapshot(t, out)
	// Neither the order of the layers nor an unchanged layer changes the permutation.
	same := &Permutation{Layers: slices.Clone(p.Layers)}
	slices.Reverse(same.Layers)
	second := mustRun(t, Options{Model: model, Permutation: same, Out: out})
	if first.Reused || !second.Reused || second.ModelDigest != first.ModelDigest {
		t.Errorf("first %+v, second %+v", first, second)
	}
	if diff := cmp.Diff(before, snapshot(t, out)); diff != "" {
		t.Error(diff)
	}
	report, err := checkpoint.Inspect(out)
	if err != nil || report.ModelDigest != first.ModelDigest {
		t.Errorf("digest %s, %v; the result has %s", report.ModelDigest, err, first.ModelDigest)
	}
}

func TestConcurrentRuns(t *testing.T) {
	m := generators["mixtral in GPTQ"](2)
	p := m.permutation(m.layers...)
	model := m.write(t, 100)
	out := filepath.Join(t.TempDir(), "out")
	results := make([]*Result, 4)
	var group sync.WaitGroup
	for i := range results {
		group.Go(func() {
			result, err := Run(t.Context(), Options{Model: model, Permutation: p, Out: out})
			if err != nil {
				t.Error(err)
				return
			}
			results[i] = result
		})
	}
	group.Wait()
	if t.Failed() {
		return
	}
	made := 0
	for _, result := range results {
		if !result.Reused {
			made++
		}
	}
	if made != 1 {
		t.Errorf("%d runs created the output, want 1", made)
	}
	sameTensors(t, expected(m.tensors, p), readAll(t, out))
}

// TestExistingOutput modifies the output directory between two runs.
func TestExistingOutput(t *testing.T) {
	m := generators["qwen3_moe"](1)
	p := m.permutation(m.layers...)
	model := m.write(t, 30)
	flip := func(t *testing.T, path string, at int64) {
		t.Helper()
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if at < 0 {
			at += int64(len(content))
		}
		content[at] ^= 1
		writeFile(t, path, content)
	}
	for name, test := range map[string]struct {
		change func(t *testing.T, out string)
		o      Options
		want   string
	}{
		"another permutation": {func(*testing.T, string) {}, Options{Permutation: m.permutation(0)}, "holds another checkpoint: it has another permutation"},
		"something else": {func(t *testing.T, out string) {
			if err := os.Remove(filepath.Join(out, manifestFile)); err != nil {
				t.Fatal(err)
			}
		}, Options{}, "was not made by reshuffle"},
		"another format": {func(t *testing.T, out string) {
			writeFile(t, filepath.Join(out, manifestFile), []byte(`{"format":"x"}`))
		}, Options{}, `its format is "x"`},
		"manifest damaged": {func(t *testing.T, out string) {
			writeFile(t, filepath.Join(out, manifestFile), []byte(`{`))
		}, Options{}, manifestFile},
		"config changed": {func(t *testing.T, out string) {
			flip(t, filepath.Join(out, checkpoint.ConfigFile), 5)
		}, Options{}, "config.json is damaged"},
		"shard missing": {func(t *testing.T, out string) {
			if err := os.Remove(filepath.Join(out, "model-00002.safetensors")); err != nil {
				t.Fatal(err)
			}
		}, Options{}, "model-00002.safetensors does not exist"},
		"byte of a weight, with full verification": {func(t *testing.T, out string) {
			flip(t, filepath.Join(out, "model-00002.safetensors"), -1)
		}, Options{Verify: true}, "differs from the source"},
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			mustRun(t, Options{Model: model, Permutation: p, Out: out})
			test.change(t, out)
			before := snapshot(t, out)
			test.o.Model, test.o.Out = model, out
			if test.o.Permutation == nil {
				test.o.Permutation = p
			}
			_, err := Run(t.Context(), test.o)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			if diff := cmp.Diff(before, snapshot(t, out)); diff != "" {
				t.Errorf("the output was changed: %s", diff)
			}
		})
	}
}

// TestOtherWeightsOfTheSameLayout has a model that differs from the first model only in values.
func TestOtherWeightsOfTheSameLayout(t *testing.T) {
	m := generators["glm4_moe"](1)
	p := m.permutation(m.layers...)
	out := filepath.Join(t.TempDir(), "out")
	model := m.write(t, 1<<20)
	mustRun(t, Options{Model: model, Permutation: p, Out: out})
	path := filepath.Join(model, "model-00001.safetensors")
	file, err := checkpoint.OpenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	content[file.DataStart()+file.Tensors["model.layers.1.self_attn.q_proj.weight"].Begin] ^= 1
	writeFile(t, path, content)
	if _, err := Run(t.Context(), Options{Model: model, Permutation: p, Out: out}); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), "made from another model") {
		t.Errorf("got %v", err)
	}
}

// TestOtherFiles checks the treatment of files that are not shards.
func TestOtherFiles(t *testing.T) {
	m := generators["olmoe"](1)
	p := m.permutation(1)
	model := m.write(t, 100)
	come := []string{"tokenizer.json", "README.md", "sub/dir/file.txt", ".gitattributes", "training_args.bin", "tokenizer.model", "tokenizer_model.bin", "model.md", "generation_config.json"}
	stay := []string{"consolidated.safetensors", "original/model.safetensors", "model.Q4.gguf", "pytorch_model.bin", "pytorch_model.bin.index.json", "metal/model.bin",
		"original/consolidated.00.bin", "consolidated.safetensors.index.json", "ggml-model-q4_0.bin", "model-00001-of-00002.bin", "model.pt", "consolidated.00.pth",
		"last.ckpt", "rust_model.ot", "weights.npz", "model.nemo", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx.data"}
	for _, name := range slices.Concat(come, stay, []string{".cache/huggingface/x.metadata"}) {
		writeFile(t, filepath.Join(model, name), []byte("content of "+name))
	}
	blob := filepath.Join(model, "sub", "blob")
	writeFile(t, blob, []byte("linked"))
	if err := os.Symlink("sub/blob", filepath.Join(model, "vocab.json")); err != nil {
		t.Fatal(err)
	}
	// Files that an earlier run or another tool has left in the staging directory must not be part of the output.
	out := filepath.Join(t.TempDir(), "out")
	j, err := newJob(t.Context(), Options{Model: model, Permutation: p, Out: out})
	if err != nil {
		t.Fatal(err)
	}
	j.close()
	writeFile(t, filepath.Join(stagingDir(j.out, identity(j.identity, p.Digest())), "stale.txt"), []byte("x"))
	writeFile(t, hidden(j.out, ".0123456789abcdef.partial/model.safetensors"), []byte("x"))
	result := mustRun(t, Options{Model: model, Permutation: p, Out: out})
	slices.Sort(stay)
	if diff := cmp.Diff(stay, slices.Sorted(slices.Values(result.LeftOut))); diff != "" {
		t.Error(diff)
	}
	want := append(come, "vocab.json", "sub/blob", manifestFile, checkpoint.ConfigFile, checkpoint.IndexFile, "model-00001.safetensors", "model-00002.safetensors")
	slices.Sort(want)
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(snapshot(t, out)))); diff != "" {
		t.Error(diff)
	}
	sameFile(t, blob, filepath.Join(out, "vocab.json"))
	sameFile(t, filepath.Join(model, "sub/dir/file.txt"), filepath.Join(out, "sub/dir/file.txt"))
	left, err := filepath.Glob(filepath.Join(filepath.Dir(out), ".*"))
	if err != nil || !slices.Equal(left, []string{hidden(out, usedSuffix)}) {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestCancel ends a run before it writes, as SIGTERM does. The next run finishes the output.
func TestCancel(t *testing.T) {
	m := generators["gpt_oss"](1)
	p := m.permutation(m.layers...)
	model := m.write(t, 3)
	out := filepath.Join(t.TempDir(), "out")
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Run(ctx, Options{Model: model, Permutation: p, Out: out, Parallel: 1, atStep: func(string) { cancel() }})
	if err == nil || checkpoint.IsInvalid(err) {
		t.Fatalf("got %v, want an error that is not an InvalidError", err)
	}
	if result := mustRun(t, Options{Model: model, Permutation: p, Out: out}); result.Resumed == 0 || result.Reused {
		t.Errorf("result %+v", result)
	}
	sameTensors(t, expected(m.tensors, p), readAll(t, out))
}

// TestReadableByOthers runs under a umask that would hide the output from an engine of another user.
func TestReadableByOthers(t *testing.T) {
	m := generators["qwen3_moe"](1)
	p := m.permutation(m.layers...)
	model := m.write(t, 30)
	writeFile(t, filepath.Join(model, "sub", "dir", "vocab.txt"), []byte("a b"))
	out := filepath.Join(t.TempDir(), "out")
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	mustRun(t, Options{Model: model, Permutation: p, Out: out, Verify: true})
	seen := 0
	err := filepath.WalkDir(out, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		want := fs.FileMode(0o644)
		if entry.IsDir() {
			want = 0o755
		}
		if seen++; info.Mode().Perm() != want {
			t.Errorf("%s has mode %o, want %o", path, info.Mode().Perm(), want)
		}
		return nil
	})
	if err != nil || seen < 6 {
		t.Errorf("%d files and directories: %v", seen, err)
	}
}
