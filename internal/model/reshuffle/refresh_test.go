// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
)

// versions are two sets of the files of a model other than its weights and config.
var versions = [2]map[string]string{
	{"tokenizer.json": "1", "README.md": "same", "custom.py": "x", "old/code.py": "y", "old/deep/code.py": "z", "swap": "file", "swop/file": "in a directory",
		"hf_quant_config.json": `{"ignore":["model.layers.1.mlp.experts.3"]}`},
	{"tokenizer.json": "2", "README.md": "same", "chat_template.jinja": "new", "swap/file": "in a directory", "swop": "file",
		"hf_quant_config.json": `{"ignore":["model.layers.1.mlp.experts.4"]}`},
}

// setVersion replaces the files of a model by one of the sets.
func setVersion(t *testing.T, dir string, version int) {
	t.Helper()
	for _, files := range versions {
		for name := range files {
			if err := os.RemoveAll(filepath.Join(dir, strings.Split(name, "/")[0])); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, text := range versions[version] {
		writeFile(t, filepath.Join(dir, name), []byte(text))
	}
}

// sameOutput compares an output with the output of a fresh run.
func sameOutput(t *testing.T, o Options) {
	t.Helper()
	fresh := o
	fresh.Out = filepath.Join(t.TempDir(), "fresh")
	mustRun(t, fresh)
	contents := func(dir string) map[string]string {
		files := snapshot(t, dir)
		for name, what := range files {
			files[name] = what[len(what)-64:] // without the time
		}
		return files
	}
	if diff := cmp.Diff(contents(fresh.Out), contents(o.Out)); diff != "" {
		t.Errorf("the output does not match the current model: %s", diff)
	}
}

// TestRefresh checks that a run that finds its output updates the files that the model's digest does not cover, and no
// others.
func TestRefresh(t *testing.T) {
	m := generators["qwen3_moe"](1)
	model := m.write(t, 30)
	setVersion(t, model, 0)
	o := Options{Model: model, Permutation: m.permutation(m.layers...), Out: filepath.Join(t.TempDir(), "out")}
	mustRun(t, o)
	// Earlier versions included the outputs that were on the model's volume.
	manifest, _, err := readManifest(o.Out)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"KEY/" + manifestFile, ".KEY.used"} {
		writeFile(t, filepath.Join(o.Out, name), []byte("x"))
		manifest.Files[name] = digest([]byte("x"))
	}
	if err := manifest.save(o.Out); err != nil {
		t.Fatal(err)
	}
	setVersion(t, model, 1)
	reader, err := os.Open(filepath.Join(o.Out, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	before := snapshot(t, o.Out)
	if result := mustRun(t, o); !result.Reused {
		t.Errorf("result %+v", result)
	}
	after := snapshot(t, o.Out)
	for name := range before {
		if strings.HasPrefix(name, "model") || name == checkpoint.ConfigFile || name == "README.md" {
			if before[name] != after[name] {
				t.Errorf("%s was written again", name)
			}
		}
	}
	old := make([]byte, 2)
	if n, err := reader.Read(old); n != 1 || old[0] != '1' {
		t.Errorf("a reader of the old file sees %q, %v", old[:n], err)
	}
	for _, name := range []string{"old", "KEY"} {
		if _, err := os.Stat(filepath.Join(o.Out, name)); err == nil {
			t.Errorf("the directory %s still exists", name)
		}
	}
	sameOutput(t, o)
	mustRun(t, o)
	if diff := cmp.Diff(after, snapshot(t, o.Out)); diff != "" {
		t.Errorf("a run without changes wrote: %s", diff)
	}
}

// TestKilledRefresh kills a run at each of its writes. The next run finishes, whether the model stays the same or is
// reverted.
func TestKilledRefresh(t *testing.T) {
	m := generators["qwen3_moe"](1)
	model, p, base := m.write(t, 30), m.permutation(m.layers...), t.TempDir()
	killed := true
	for step := 1; killed; step++ {
		for _, then := range []int{1, 0} {
			out := filepath.Join(base, fmt.Sprint(step, then))
			o := Options{Model: model, Permutation: p, Out: out}
			setVersion(t, model, 0)
			mustRun(t, o)
			setVersion(t, model, 1)
			killed = startChild(t, childWork{Model: model, Out: out, Permutation: p, DieAt: step})
			setVersion(t, model, then)
			mustRun(t, o)
			sameOutput(t, o)
		}
		if !killed && step < 8 {
			t.Errorf("the run had only %d steps", step)
		}
	}
}

// TestRefreshOfLargeFiles checks that large files are compared by size.
func TestRefreshOfLargeFiles(t *testing.T) {
	m := generators["qwen3_moe"](1)
	model := m.write(t, 30)
	o := Options{Model: model, Permutation: m.permutation(0), Out: filepath.Join(t.TempDir(), "out")}
	large := filepath.Join(model, "vocabulary.txt")
	for _, step := range []struct {
		text string
		size int64
		want string
	}{{"a", comparedBytes + 1, "a"}, {"b", comparedBytes + 1, "a"}, {"b", comparedBytes + 2, "b"}, {"c", comparedBytes, "c"}, {"d", comparedBytes, "d"}} {
		writeFile(t, large, []byte(step.text))
		if err := os.Truncate(large, step.size); err != nil {
			t.Fatal(err)
		}
		mustRun(t, o)
		got, err := os.ReadFile(filepath.Join(o.Out, "vocabulary.txt"))
		if err != nil || string(got[:1]) != step.want {
			t.Errorf("after %+v the output has %q, %v", step, got[:1], err)
		}
	}
}

// TestRefreshKeepsUnreadFiles checks that files below a directory that this user may not read are not treated as
// removed.
func TestRefreshKeepsUnreadFiles(t *testing.T) {
	j := &job{source: &checkpoint.Checkpoint{}, files: &sourceFiles{leftOut: []string{"sub"}}}
	_, removed, err := j.stale(&Manifest{Files: map[string]string{"sub/code.py": "x", "subs/code.py": "x", "code.py": "x"}})
	if err != nil || !slices.Equal(removed, []string{"code.py", "subs/code.py"}) {
		t.Errorf("removed files are %q, %v", removed, err)
	}
}

// TestRefreshStaysInsideTheOutput checks that a manifest cannot name files outside of its output.
func TestRefreshStaysInsideTheOutput(t *testing.T) {
	dir := t.TempDir()
	out, outside := filepath.Join(dir, "out"), filepath.Join(dir, "outside")
	writeFile(t, filepath.Join(outside, "file"), []byte("x"))
	writeFile(t, filepath.Join(out, "file"), []byte("x"))
	if err := os.Symlink(outside, filepath.Join(out, "link")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"../outside/file", "link/file", filepath.Join(outside, "file")} {
		if err := removeFile(out, name); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if got := slices.Sorted(maps.Keys(snapshot(t, dir))); !slices.Equal(got, []string{"out/file", "outside/file"}) {
		t.Errorf("files are %q", got)
	}
}

// TestRefreshOfAnotherUsersOutput checks that the update fails if only the other user may write. If it did not, an
// engine would serve outdated files.
func TestRefreshOfAnotherUsersOutput(t *testing.T) {
	s := newOpenShared(t, 1)
	setVersion(t, s.model, 0)
	mustRunAs(t, userA, s.work[0])
	mustRunAs(t, userB, s.work[0])
	setVersion(t, s.model, 1)
	before := snapshot(t, s.work[0].Out)
	logged, err := runAs(t, userB, s.work[0])
	if err == nil || !strings.Contains(logged, "failed to update 10 files, such as chat_template.jinja, that differ from the model ") {
		t.Errorf("%v: %s", err, logged)
	}
	if diff := cmp.Diff(before, snapshot(t, s.work[0].Out)); diff != "" {
		t.Error(diff)
	}
	defer syscall.Umask(syscall.Umask(0o077))
	mustRunAs(t, userA, s.work[0])
	mustRunAs(t, userB, s.work[0])
}

// TestRefreshAfterAnotherUser checks that temporary files of a killed run of root do not keep a user from updating the
// user's output.
func TestRefreshAfterAnotherUser(t *testing.T) {
	s := newOpenShared(t, 1)
	setVersion(t, s.model, 0)
	mustRunAs(t, userA, s.work[0])
	setVersion(t, s.model, 1)
	for _, name := range []string{manifestFile, "tokenizer.json"} {
		writeFile(t, filepath.Join(s.work[0].Out, name+temporarySuffix), []byte("root's"))
	}
	mustRunAs(t, userA, s.work[0])
	sameOutput(t, s.work[0])
}

// TestRefreshAfterAWait checks that a run that waited for another run uses the files that the model has after the wait,
// whether or not the other run created the output.
func TestRefreshAfterAWait(t *testing.T) {
	for name, made := range map[string]bool{"created": true, "not created": false} {
		t.Run(name, func(t *testing.T) {
			m := generators["qwen3_moe"](1)
			model := m.write(t, 30)
			setVersion(t, model, 0)
			o := Options{Model: model, Permutation: m.permutation(m.layers...), Out: filepath.Join(t.TempDir(), "out")}
			if made {
				mustRun(t, o)
			}
			first, err := filelock.Wait(t.Context(), hidden(o.Out, lockSuffix))
			if err != nil {
				t.Fatal(err)
			}
			waits, ended := make(chan struct{}, 1), make(chan error)
			log := funcr.New(func(_, logged string) {
				if strings.Contains(logged, "Waiting for another run") {
					waits <- struct{}{}
				}
			}, funcr.Options{})
			go func() {
				_, err := Run(logr.NewContext(t.Context(), log), o)
				ended <- err
			}()
			<-waits
			setVersion(t, model, 1)
			writeFile(t, filepath.Join(model, "come.txt"), []byte("x"))
			first.Release()
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			sameOutput(t, o)
			sameFile(t, filepath.Join(model, "come.txt"), filepath.Join(o.Out, "come.txt"))
		})
	}
}
