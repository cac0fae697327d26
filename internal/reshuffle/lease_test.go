package reshuffle

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/reshuffle/filelock"
)

// free tells that nobody holds an output.
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

// An output is held by each that asked for it, from before it is there; and its time of use is that of the last.
func TestHold(t *testing.T) {
	m := generators["qwen3_moe"](1)
	o := Options{Model: m.write(t, 30), Permutation: m.permutation(m.layers...), Out: filepath.Join(t.TempDir(), "out"), Parallel: 1}
	steps := 0
	o.atStep = func(string) {
		if steps++; free(t, o.Out) {
			t.Error("a run does not hold its output")
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
		t.Error("the output is free although it is held")
	}
	long := time.Now().Add(-time.Hour)
	for name, use := range map[string]func(){
		"the end of a hold":          second.Release,
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
		t.Error("the output is still held")
	}
}

// A run that fails holds nothing and leaves no trace.
func TestHoldOfAFailure(t *testing.T) {
	m := generators["qwen3_moe"](1)
	out := filepath.Join(t.TempDir(), "out")
	writeFile(t, filepath.Join(out, "x"), []byte("x"))
	_, _, err := Acquire(t.Context(), Options{Model: m.write(t, 30), Permutation: m.permutation(0), Out: out})
	if err == nil {
		t.Fatal("no error")
	}
	if _, err := os.Stat(hidden(out, usedSuffix)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the time of use was left: %v", err)
	}
}
