// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
)

// free reports whether an output has no lease.
func free(t *testing.T, out string) bool {
	t.Helper()
	file, err := os.Open(hidden(out, usedSuffix))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	err = filelock.Flock(file, unix.LOCK_EX)
	if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
		t.Fatal(err)
	}
	return err == nil
}

func lastUse(t *testing.T, out string) time.Time {
	t.Helper()
	info, err := os.Stat(hidden(out, usedSuffix))
	if err != nil {
		t.Fatal(err)
	}
	return info.ModTime()
}

// TestLease checks that every caller of Acquire gets a lease that begins before the output exists, and that the time of
// use is that of the last one.
func TestLease(t *testing.T) {
	m := generators["qwen3_moe"](1)
	o := Options{Model: m.write(t, 30), Permutation: m.permutation(m.layers...), Out: filepath.Join(t.TempDir(), "out"), Parallel: 1}
	steps := 0
	o.atStep = func(string) {
		if steps++; free(t, o.Out) {
			t.Error("a run has no lease on its output")
		}
	}
	_, first, err := Acquire(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	_, second, err := Acquire(t.Context(), o)
	if err != nil || steps == 0 {
		t.Fatalf("%d steps, %v", steps, err)
	}
	first.Release()
	if free(t, o.Out) {
		t.Error("the output is free despite a lease")
	}
	long := time.Now().Add(-time.Hour)
	for name, use := range map[string]func(){
		"the end of a lease":         second.Release,
		"a run that finds an output": func() { mustRun(t, o) },
	} {
		if err := os.Chtimes(hidden(o.Out, usedSuffix), long, long); err != nil {
			t.Fatal(err)
		}
		if use(); time.Since(lastUse(t, o.Out)) > time.Minute {
			t.Errorf("%s did not change the time of use", name)
		}
	}
	if !free(t, o.Out) {
		t.Error("the output is still leased")
	}
}

// TestLeaseOfAFailedRun checks that a failed run leaves no lease and no use file.
func TestLeaseOfAFailedRun(t *testing.T) {
	m := generators["qwen3_moe"](1)
	out := filepath.Join(t.TempDir(), "out")
	writeFile(t, filepath.Join(out, "x"), []byte("x"))
	_, _, err := Acquire(t.Context(), Options{Model: m.write(t, 30), Permutation: m.permutation(0), Out: out})
	if err == nil {
		t.Fatal("no error")
	}
	if _, err := os.Stat(hidden(out, usedSuffix)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the use file still exists: %v", err)
	}
}
