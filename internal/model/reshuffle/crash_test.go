// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/test/tier"
)

// kills is the number of kills in TestRandomKills and TestSharedDirectory. Long test runs raise it.
// kills is the number of processes killed by TestRandomKills and TestSharedDirectory.
var kills = tier.Choose(8, 8, 200)

// TestMain runs the test binary as the process that tests kill, if requested by the environment.
func TestMain(m *testing.M) {
	if text := os.Getenv("RESHUFFLE_TEST_CHILD"); text != "" {
		child(text)
	}
	if text := os.Getenv("RESHUFFLE_TEST_TENANT"); text != "" {
		cacheChild(text)
	}
	os.Exit(m.Run())
}

// childWork describes the work of a child process, and the step or the time after which it dies; 0 is never.
type childWork struct {
	Model, Out  string
	Permutation *Permutation
	DieAt       int
	DieAfter    time.Duration
	Limit       int64
}

func child(text string) {
	var work childWork
	if err := json.Unmarshal([]byte(text), &work); err != nil {
		panic(err)
	}
	die := func() {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	if work.DieAfter > 0 {
		time.AfterFunc(work.DieAfter, die)
	}
	steps := 0
	var mu sync.Mutex
	o := Options{Model: work.Model, Permutation: work.Permutation, Out: work.Out, Limit: work.Limit, atStep: func(string) {
		mu.Lock()
		defer mu.Unlock()
		if steps++; steps == work.DieAt {
			die()
		}
	}}
	if _, err := Run(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func childCommand(t *testing.T, work childWork) *exec.Cmd {
	t.Helper()
	text, err := json.Marshal(work)
	if err != nil {
		t.Fatal(err)
	}
	// The binary's path may contain directories that another user may not enter.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), "RESHUFFLE_TEST_CHILD="+string(text))
	return cmd
}

// startChild returns whether the process was killed.
func startChild(t *testing.T, work childWork) (killed bool) {
	t.Helper()
	out, err := childCommand(t, work).CombinedOutput()
	if err == nil {
		return false
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return true
	}
	t.Fatalf("%v: %s", err, out)
	return false
}

// TestKill kills the process at every step, first of a fresh run and then of a run on every state that a kill has left.
// The output never exists in part, and the next run finishes it.
func TestKill(t *testing.T) {
	m := generators["deepseek_v3 in FP8, with groups and multi-token prediction"](11)
	p := m.permutation(m.layers...)
	model := m.write(t, 60)
	writeFile(t, filepath.Join(model, "tokenizer", "vocab.txt"), []byte("a b c"))
	want := expected(m.tensors, p)
	base := t.TempDir()
	for step := 1; ; step++ {
		out := filepath.Join(base, fmt.Sprint(step))
		killed := startChild(t, childWork{Model: model, Out: out, Permutation: p, DieAt: step})
		if _, err := os.Stat(out); killed && err == nil {
			sameTensors(t, want, readAll(t, out))
		}
		// Most steps of the second process are steps that the first process did not reach.
		killedAgain := startChild(t, childWork{Model: model, Out: out, Permutation: p, DieAt: step})
		if _, err := os.Stat(out); killedAgain && err == nil {
			sameTensors(t, want, readAll(t, out))
		}
		result := mustRun(t, Options{Model: model, Permutation: p, Out: out, Verify: true})
		sameTensors(t, want, readAll(t, out))
		if killedAgain && !result.Reused && step < 4 && result.Resumed == 0 && step > 1 {
			t.Errorf("step %d: nothing was resumed", step)
		}
		if !killed {
			if step < 10 {
				t.Errorf("the run had only %d steps", step)
			}
			break
		}
	}
	left, err := filepath.Glob(filepath.Join(base, ".*"))
	left = slices.DeleteFunc(left, func(path string) bool { return strings.HasSuffix(path, usedSuffix) })
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestRandomKills kills runs at random times, in every second round until a run ends by itself. A concurrent reader
// sees either no output or the whole output.
func TestRandomKills(t *testing.T) {
	m := generators["qwen3_moe"](13)
	for l := range testLayers {
		// Add enough bytes that a kill can happen during a copy.
		m.add(fmt.Sprintf("model.layers.%d.self_attn.o_proj.weight", l), "BF16", 1<<10, 1<<11)
	}
	p := m.permutation(m.layers...)
	model := m.write(t, 12)
	want := expected(m.tensors, p)
	base := t.TempDir()
	start := time.Now()
	if startChild(t, childWork{Model: model, Out: filepath.Join(base, "whole"), Permutation: p}) {
		t.Fatal("the first run was killed")
	}
	whole := time.Since(start)
	for killed, round := 0, 0; killed < kills; round++ {
		out := filepath.Join(base, fmt.Sprint(round))
		stop := watch(t, out, len(m.tensors))
		for attempt := 0; attempt < 1+3*(round%2); attempt++ {
			if startChild(t, childWork{Model: model, Out: out, Permutation: p, DieAfter: time.Duration(m.rng.Int64N(int64(whole)))}) {
				killed++
			}
		}
		mustRun(t, Options{Model: model, Permutation: p, Out: out, Verify: true})
		stop()
		sameTensors(t, want, readAll(t, out))
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
	}
}

// watch repeatedly opens the output until stopped. A checkpoint that exists must be complete.
func watch(t *testing.T, out string, tensors int) (stop func()) {
	finished, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-finished:
				return
			case <-time.After(time.Millisecond):
			}
			if _, err := os.Stat(out); errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err := whole(out, tensors); err != nil {
				t.Errorf("a reader saw an incomplete output: %v", err)
				return
			}
		}
	}()
	return func() {
		close(finished)
		<-ended
	}
}

func whole(out string, tensors int) error {
	c, err := checkpoint.Open(out)
	if err != nil {
		return err
	}
	defer c.Close()
	seen := 0
	for _, shard := range c.Shards {
		seen += len(shard.Tensors)
	}
	manifest, found, err := readManifest(out)
	if err != nil || !found || seen != tensors {
		return fmt.Errorf("%d tensors, manifest %v, %w", seen, found, err)
	}
	return manifest.check(out)
}
