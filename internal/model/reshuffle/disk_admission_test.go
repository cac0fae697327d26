// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
)

func TestEvict(t *testing.T) {
	at := func(seconds int64) time.Time { return time.Unix(seconds, 0) }
	a := &cachedOutput{out: "a", bytes: 10, complete: true, lastUse: at(3)}
	b := &cachedOutput{out: "b", bytes: 20, complete: true, lastUse: at(1)}
	held := &cachedOutput{out: "c", bytes: 40, complete: true, lastUse: at(0), keepReason: "in use"}
	dead := &cachedOutput{out: "d", bytes: 5, lastUse: at(9)}
	same := &cachedOutput{out: "e", bytes: 10, complete: true, lastUse: at(3)}
	all := []*cachedOutput{same, a, held, b, dead}
	for name, tc := range map[string]struct {
		excess int64
		want   string
	}{
		"none needed":         {0, ""},
		"below":               {-5, ""},
		"incomplete first":    {1, "d"},
		"then the oldest":     {6, "d b"},
		"no more than that":   {25, "d b"},
		"by name":             {26, "d b a"},
		"all removable":       {45, "d b a e"},
		"more than removable": {46, "d b a e"},
		"the largest excess":  {1 << 60, "d b a e"},
	} {
		remove, removable := evict(all, tc.excess)
		var got []string
		for _, r := range remove {
			got = append(got, r.out)
		}
		if strings.Join(got, " ") != tc.want || removable != 45 {
			t.Errorf("%s: removes %v of %d bytes, want %s of 45", name, got, removable, tc.want)
		}
	}
}

// TestOutputBytes checks that the computed size is equal to the size of the finished output, to the byte.
func TestOutputBytes(t *testing.T) {
	for name, generate := range generators {
		m := generate(3)
		model := m.write(t, 40)
		writeFile(t, filepath.Join(model, "sub", "vocab.txt"), []byte("a b c"))
		out := filepath.Join(t.TempDir(), "out")
		o := Options{Model: model, Permutation: m.permutation(m.layers...), Out: out, Verify: true}
		j, err := newJob(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		want, _, err := j.outputBytes()
		j.close()
		if err != nil {
			t.Fatal(err)
		}
		mustRun(t, o)
		if got, err := treeBytes(out); got != want || err != nil {
			t.Errorf("%s: the output has %d bytes, want %d: %v", name, got, want, err)
		}
	}
}

// shared is a directory of outputs of one model with different permutations.
type shared struct {
	model   string
	dir     string
	tensors map[string]tensor
	work    []Options
	// sizes are the sizes of the outputs. bytes is the largest size.
	sizes []int64
	bytes int64
}

func newShared(t *testing.T, outputs int) *shared {
	t.Helper()
	m := generators["qwen3_moe"](21)
	s := &shared{model: m.write(t, 30), dir: t.TempDir(), tensors: m.tensors}
	for i := range outputs {
		o := Options{Model: s.model, Permutation: m.permutation(m.layers...), Out: filepath.Join(s.dir, fmt.Sprintf("out-%d", i)), grace: 1}
		j, err := newJob(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		size, _, err := j.outputBytes()
		j.close()
		if err != nil {
			t.Fatal(err)
		}
		s.sizes, s.bytes = append(s.sizes, size), max(s.bytes, size)
		s.work = append(s.work, o)
	}
	return s
}

// limited returns the options of an output, with a limit of a number of outputs.
func (s *shared) limited(i, outputs int) Options {
	o := s.work[i]
	o.Limit = int64(outputs) * s.bytes
	return o
}

// used sets the last use of an output to a time in the past.
func (s *shared) used(t *testing.T, i int, ago time.Duration) {
	t.Helper()
	at := time.Now().Add(-ago)
	if err := os.Chtimes(hidden(s.work[i].Out, usedSuffix), at, at); err != nil {
		t.Fatal(err)
	}
}

func (s *shared) there(t *testing.T) string {
	t.Helper()
	var names []string
	for i, o := range s.work {
		if _, ok := completeOutput(o.Out); ok {
			names = append(names, fmt.Sprint(i))
		}
	}
	return strings.Join(names, " ")
}

// TestLimitRemovesTheLeastRecentlyUsed checks that a new output replaces the least recently used outputs.
func TestLimitRemovesTheLeastRecentlyUsed(t *testing.T) {
	s := newShared(t, 4)
	for i, ago := range []time.Duration{2 * time.Hour, 3 * time.Hour, time.Hour} {
		mustRun(t, s.limited(i, 3))
		s.used(t, i, ago)
	}
	if got := s.there(t); got != "0 1 2" {
		t.Fatalf("outputs %s exist", got)
	}
	mustRun(t, s.limited(3, 3))
	if got := s.there(t); got != "0 2 3" {
		t.Errorf("outputs %s exist, want 0 2 3", got)
	}
	// An existing output needs no space, regardless of the limit.
	if result := mustRun(t, s.limited(0, 0)); !result.Reused || s.there(t) != "0 2 3" {
		t.Errorf("%+v; outputs %s exist", result, s.there(t))
	}
	o := s.limited(1, 1)
	mustRun(t, o)
	if got := s.there(t); got != "1" {
		t.Errorf("outputs %s exist, want 1", got)
	}
	sameTensors(t, expected(s.tensors, o.Permutation), readAll(t, o.Out))
	left, err := filepath.Glob(filepath.Join(s.dir, ".*"))
	if err != nil || !slices.Equal(left, []string{hidden(o.Out, usedSuffix)}) {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestLimitRefuses checks that outputs that are in use, were used recently, or were not created by this package are
// kept, and that a run without enough space returns an error and writes nothing.
func TestLimitRefuses(t *testing.T) {
	s := newShared(t, 4)
	mustRun(t, s.work[0])
	_, lease, err := Acquire(t.Context(), s.work[1])
	if err != nil {
		t.Fatal(err)
	}
	s.used(t, 1, time.Hour)
	// Directories of other programs, outputs of other versions, and links are neither counted nor removed.
	writeFile(t, filepath.Join(s.dir, "other", "model.safetensors"), bytes.Repeat([]byte{1}, 1<<16))
	writeFile(t, filepath.Join(s.dir, "old", manifestFile), []byte(`{"format":"semmoe-reshuffle/0"}`))
	writeFile(t, filepath.Join(s.dir, ".foreign.lock"), []byte("x"))
	writeFile(t, filepath.Join(s.dir, ".foreign.used"), []byte("x"))
	if err := os.Symlink(s.work[0].Out, filepath.Join(s.dir, "link")); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, s.dir)
	o := s.limited(2, 2)
	o.grace = time.Hour
	_, err = Run(t.Context(), o)
	if !checkpoint.IsInvalid(err) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{"out-2 needs ", fmt.Sprintf("is %d, and these cannot be removed now: ", o.Limit), "out-1 (", "in use)"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not contain %q", err, want)
		}
	}
	used := regexp.MustCompile(`out-0 \(\d+ bytes, used \d+ s ago\)`)
	if !used.MatchString(err.Error()) {
		t.Errorf("%v does not contain the time of the last use of out-0", err)
	}
	if diff := cmp.Diff(before, snapshot(t, s.dir)); diff != "" {
		t.Errorf("a run that was refused changed the directory: %s", diff)
	}
	o.grace = 0
	if _, err := Run(t.Context(), o); err == nil || !used.MatchString(err.Error()) {
		t.Errorf("a released output is not removed: %v", err)
	}
	mustRun(t, s.limited(2, 2))
	if got := s.there(t); got != "1 2" {
		t.Errorf("outputs %s exist, want 1 2", got)
	}
	lease.Release()
	mustRun(t, s.limited(3, 1))
	if got := s.there(t); got != "3" {
		t.Errorf("outputs %s exist, want 3", got)
	}
	after := snapshot(t, s.dir)
	for _, name := range []string{"other/model.safetensors", "old/" + manifestFile, ".foreign.lock", ".foreign.used"} {
		if before[name] != after[name] {
			t.Errorf("%s was changed", name)
		}
	}
	o = s.limited(0, 0)
	o.Limit = 10
	if _, err := Run(t.Context(), o); err == nil || strings.Contains(err.Error(), "cannot be removed") {
		t.Errorf("an output larger than the limit: %v", err)
	}
	if got := s.there(t); got != "3" {
		t.Errorf("outputs %s exist, want 3: an output was removed unnecessarily", got)
	}
}

// TestLimitKeepsTheModel checks that the model is kept if it is an output itself, in the same directory.
func TestLimitKeepsTheModel(t *testing.T) {
	s := newShared(t, 2)
	mustRun(t, s.work[0])
	o := s.limited(1, 1)
	o.Model = s.work[0].Out
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "the model)") {
		t.Errorf("got %v", err)
	}
	o.Limit *= 2
	mustRun(t, o)
	if got := s.there(t); got != "0 1" {
		t.Errorf("outputs %s exist, want 0 1", got)
	}
}

// TestLimitCountsParts checks that parts left by a killed run are removed before any output, and that reservations of
// active runs count.
func TestLimitCountsParts(t *testing.T) {
	s := newShared(t, 3)
	mustRun(t, s.work[0])
	part := stagingDir(s.work[1].Out, strings.Repeat("0", 64))
	writeFile(t, filepath.Join(part, "model.safetensors"), bytes.Repeat([]byte{1}, int(s.bytes)))
	mustRun(t, s.limited(2, 2))
	if _, err := os.Stat(part); !errors.Is(err, fs.ErrNotExist) || s.there(t) != "0 2" {
		t.Errorf("%v; outputs %s exist, want 0 2", err, s.there(t))
	}
	working := s.limited(1, 3)
	working.Parallel = 1
	refused := false
	working.atStep = func(string) {
		if refused {
			return
		}
		refused = true
		if err := os.RemoveAll(s.work[0].Out); err != nil {
			t.Error(err)
		}
		_, err := Run(t.Context(), s.limited(0, 1))
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("out-1 (%d bytes, being made)", s.sizes[1])) {
			t.Errorf("next to a run that has written little: %v", err)
		}
	}
	mustRun(t, working)
	if !refused {
		t.Error("the run had no step")
	}
}

// cacheWork describes which outputs a child process uses one after the other.
type cacheWork struct {
	Model        string
	Outs         []string
	Permutations []*Permutation
	Limit        int64
	Seed         uint64
	Rounds       int
}

// Exit codes of cacheChild.
const (
	childVanished = 4
	childFailed   = 5
)

func cacheChild(text string) {
	var work cacheWork
	if err := json.Unmarshal([]byte(text), &work); err != nil {
		panic(err)
	}
	rng := rand.New(rand.NewPCG(work.Seed, 3))
	for range work.Rounds {
		i := rng.IntN(len(work.Outs))
		o := Options{Model: work.Model, Permutation: work.Permutations[i], Out: work.Outs[i], Limit: work.Limit, grace: 1}
		_, lease, err := Acquire(context.Background(), o)
		switch {
		case err == nil:
		case checkpoint.IsInvalid(err) && strings.Contains(err.Error(), "the limit for all outputs"):
			continue // all others are leased
		default:
			fmt.Fprintln(os.Stderr, err)
			os.Exit(childFailed)
		}
		for range rng.IntN(4) {
			<-time.After(time.Duration(rng.IntN(3000)) * time.Microsecond)
			m, found, err := readManifest(o.Out)
			if err == nil && found {
				err = m.check(o.Out)
			}
			if err != nil || !found {
				fmt.Fprintf(os.Stderr, "%s is leased: %v, %v\n", o.Out, found, err)
				os.Exit(childVanished)
			}
		}
		lease.Release()
	}
	os.Exit(0)
}

// occupied returns the total size of the outputs in a directory. It has the admission lock, so an output that is
// renamed during the walk counts once.
func (s *shared) occupied(t *testing.T) (total int64) {
	t.Helper()
	admission, err := filelock.Wait(t.Context(), filepath.Join(s.dir, admissionLock))
	if err != nil {
		t.Error(err)
		return 0
	}
	defer admission.Release()
	for _, o := range s.work {
		var largest int64
		left, err := stagingDirs(o.Out)
		if err != nil {
			t.Error(err)
		}
		for _, path := range append(left, o.Out) {
			size, err := treeBytes(path)
			if err != nil {
				t.Error(err)
			}
			largest = max(largest, size)
		}
		total += largest
	}
	return total
}

// TestSharedDirectory has processes that share a directory and create, lease and remove outputs at random. Processes
// are killed at random. Leased outputs exist and are complete, the limit holds at every moment, and there is no
// deadlock.
func TestSharedDirectory(t *testing.T) {
	const processes, outputs, fit = 4, 5, 2
	s := newShared(t, outputs)
	limit := s.limited(0, fit).Limit
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	work := cacheWork{Model: s.model, Limit: limit, Rounds: 12}
	for _, o := range s.work {
		work.Outs, work.Permutations = append(work.Outs, o.Out), append(work.Permutations, o.Permutation)
	}
	var mu sync.Mutex
	killed, finished := 0, 0
	var children sync.WaitGroup
	for p := range processes {
		children.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(p), 5))
			for round := range max(2, kills/processes*2) {
				mine := work
				mine.Seed = uint64(p*1000 + round)
				die := round%2 == 0
				wasKilled := startCacheChild(t, ctx, mine, die, time.Duration(rng.IntN(400))*time.Millisecond)
				mu.Lock()
				if wasKilled {
					killed++
				} else {
					finished++
				}
				mu.Unlock()
			}
		})
	}
	done := make(chan struct{})
	go func() { children.Wait(); close(done) }()
	samples := 0
	for running := true; running; samples++ {
		select {
		case <-done:
			running = false
		case <-time.After(5 * time.Millisecond):
		}
		if got := s.occupied(t); got > limit {
			t.Errorf("the outputs have %d bytes, the limit is %d", got, limit)
			cancel()
		}
	}
	t.Logf("%d killed, %d finished, %d samples", killed, finished, samples)
	if killed == 0 || finished == 0 || samples < 10 {
		t.Error("the test checks nothing")
	}
	for i, o := range s.work {
		mustRun(t, s.limited(i, fit))
		sameTensors(t, expected(s.tensors, o.Permutation), readAll(t, o.Out))
	}
	left, err := filepath.Glob(filepath.Join(s.dir, ".*"))
	left = slices.DeleteFunc(left, func(path string) bool { return strings.HasSuffix(path, usedSuffix) })
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// startCacheChild runs a child, kills it after a time if die is true, and reports whether it was killed.
func startCacheChild(t *testing.T, ctx context.Context, work cacheWork, die bool, after time.Duration) bool {
	t.Helper()
	text, err := json.Marshal(work)
	if err != nil {
		t.Error(err)
		return false
	}
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "RESHUFFLE_TEST_TENANT="+string(text))
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		t.Error(err)
		return false
	}
	if die {
		timer := time.AfterFunc(after, func() { cmd.Process.Kill() })
		defer timer.Stop()
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if die && errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return true
	}
	if err != nil {
		t.Errorf("%v (exit code %d is a leased output that vanished): %s", err, childVanished, output.String())
	}
	return false
}

// TestKilledRemoval checks that a killed removal leaves no part of an output under its final name, and that the next
// run removes the rest.
func TestKilledRemoval(t *testing.T) {
	s := newShared(t, 2)
	mustRun(t, s.work[0])
	m, _ := completeOutput(s.work[0].Out)
	staging := stagingDir(s.work[0].Out, identity(m.Source, m.PermutationDigest))
	if err := os.Rename(s.work[0].Out, staging); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(staging, "model-00001.safetensors")); err != nil {
		t.Fatal(err)
	}
	if result := mustRun(t, s.limited(0, 1)); result.Reused || result.Resumed == 0 {
		t.Errorf("a run after a killed removal: %+v", result)
	}
	sameTensors(t, expected(s.tensors, s.work[0].Permutation), readAll(t, s.work[0].Out))
	if err := os.Rename(s.work[0].Out, staging); err != nil {
		t.Fatal(err)
	}
	mustRun(t, s.limited(1, 1))
	if _, err := os.Stat(staging); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the rest of a removed output still exists: %v", err)
	}
}

// TestNoSpace checks that a lack of space is detected before anything is written.
func TestNoSpace(t *testing.T) {
	s := newShared(t, 2)
	mustRun(t, s.work[0])
	j, err := newJob(t.Context(), s.limited(1, 2))
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	free := freeBytes(s.dir)
	cached, err := findCachedOutputs(j.out, j.source.Dir, j.grace)
	if err != nil || len(cached) != 1 {
		t.Fatalf("%d outputs, %v", len(cached), err)
	}
	defer cached[0].release()
	if remove, err := j.chooseRemovals(cached, s.bytes, free); err != nil || len(remove) > 1 {
		t.Errorf("%d removals, %v", len(remove), err)
	}
	if remove, err := j.chooseRemovals(cached, s.bytes, 1<<62); !errors.Is(err, unix.ENOSPC) || len(remove) > 0 {
		t.Errorf("%d removals, %v; want no space", len(remove), err)
	}
}

// TestSpaceOfMissingShards checks that a resumed run needs space only for the missing shards, from its first copy on.
func TestSpaceOfMissingShards(t *testing.T) {
	s := newShared(t, 1)
	mustRun(t, s.work[0])
	j, err := newJob(t.Context(), s.work[0])
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	first := j.source.Shards[0]
	if err := os.Remove(filepath.Join(j.out, first.Name())); err != nil {
		t.Fatal(err)
	}
	missing, err := j.missing(j.out)
	if err != nil || len(missing) != 1 || missing[0] != first {
		t.Fatalf("%d shards are missing, %v", len(missing), err)
	}
	if rest := j.copier.total - j.copier.done.Load(); rest != first.DataBytes() {
		t.Errorf("the rest has %d bytes, want %d", rest, first.DataBytes())
	}
}
