// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/model/reshuffle"
)

// runReshuffleCommand returns the exit code, standard output and the error's message.
func runReshuffleCommand(t *testing.T, args ...string) (code int, out, message string) {
	t.Helper()
	cmd := newReshuffleCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var stdout bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetArgs(args)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		code, message = cli.ExitCode(err), err.Error()
	}
	return code, stdout.String(), message
}

func TestReshuffleCommand(t *testing.T) {
	dir := t.TempDir()
	permutation, out := filepath.Join(dir, "gate-permutation.json"), filepath.Join(dir, "out")
	writePermutation(t, permutation)
	message := filepath.Join(dir, "message")
	arguments := []string{"--model", clitest.TinyModel, "--permutation", permutation, "--out", out, "--termination-message", message}
	for _, reused := range []bool{false, true} {
		code, stdout, failure := runReshuffleCommand(t, append(arguments, "--verify")...)
		var result reshuffle.Result
		if err := json.Unmarshal([]byte(stdout), &result); err != nil || code != 0 {
			t.Fatalf("exit code %d, %s; output %q: %v", code, failure, stdout, err)
		}
		if result.Reused != reused || !result.Verified || !result.Compared || result.Layers != 1 || result.Shards != 3 {
			t.Errorf("result %+v", result)
		}
		if got := readMessage(t, message); got+"\n" != stdout {
			t.Errorf("termination message %q, output %q", got, stdout)
		}
	}
	for name, test := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no model":       {arguments[2:], cli.ExitUsage, "--model is missing"},
		"no permutation": {[]string{"--model", clitest.TinyModel, "--out", out}, cli.ExitUsage, "--permutation is missing"},
		"no output":      {arguments[:4], cli.ExitUsage, "--out is missing"},
		"argument":       {append(arguments, "x"), cli.ExitUsage, "unknown command"},
		"unknown flag":   {append(arguments, "--x"), cli.ExitUsage, "unknown flag"},
		"none parallel":  {append(arguments, "--parallel", "0"), cli.ExitUsage, "--parallel is 0"},
		"negative limit": {append(arguments, "--limit", "-1"), cli.ExitUsage, "--limit is -1"},
		"over the limit": {append(arguments, "--limit", "1000", "--out", filepath.Join(dir, "new")), cli.ExitInvalidFile, "the limit for all outputs in " + dir + " is 1000"},
		"model missing":  {append(arguments, "--model", "/nonexistent"), cli.ExitInvalidFile, "/nonexistent does not exist"},
		"no such file":   {append(arguments, "--permutation", "/nonexistent"), cli.ExitInvalidFile, "permutation file"},
		"not one":        {append(arguments, "--permutation", clitest.TinyModel+"/config.json"), cli.ExitInvalidFile, "not a gate permutation"},
		"output taken":   {append(arguments, "--out", dir), cli.ExitInvalidFile, "was not made by reshuffle"},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, failure := runReshuffleCommand(t, test.args...)
			if code != test.code || stdout != "" || !strings.Contains(failure, test.want) {
				t.Errorf("exit code %d, output %q, message %q; want %d, %q", code, stdout, failure, test.code, test.want)
			}
		})
	}
}

// writePermutation writes a permutation of the small model that reverses layer 2.
func writePermutation(t *testing.T, path string) {
	t.Helper()
	newToOld := make([]int, 32)
	for i := range newToOld {
		newToOld[i] = 31 - i
	}
	text, err := json.Marshal(reshuffle.Permutation{Layers: []reshuffle.LayerPermutation{{Layer: 2, NewToOld: newToOld}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// With --hold, the command prints its result immediately and keeps the lease on the output until it receives a signal.
func TestReshuffleHold(t *testing.T) {
	dir := t.TempDir()
	permutation, out, message := filepath.Join(dir, "gate-permutation.json"), filepath.Join(dir, "out"), filepath.Join(dir, "message")
	writePermutation(t, permutation)
	free := func() bool {
		file, err := os.Open(filepath.Join(dir, ".out.used"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		return syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	cmd := newReshuffleCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	reader, writer := io.Pipe()
	cmd.SetOut(writer)
	cmd.SetArgs([]string{"--model", clitest.TinyModel, "--permutation", permutation, "--out", out, "--hold", "--termination-message", message})
	ended := make(chan error, 1)
	go func() {
		err := cmd.ExecuteContext(ctx)
		writer.CloseWithError(io.EOF)
		ended <- err
	}()
	if line, err := bufio.NewReader(reader).ReadString('\n'); err != nil || !strings.Contains(line, `"model_digest"`) {
		t.Fatalf("output %q, %v", line, err)
	}
	if free() {
		t.Error("the output has no lease")
	}
	select {
	case err := <-ended:
		t.Errorf("the command ended by itself: %v", err)
	default:
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the command ended with %v", err)
		}
	}
	if !free() || !strings.Contains(readMessage(t, message), `"model_digest"`) {
		t.Errorf("the output still has a lease, or the message is missing")
	}
}

func readMessage(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// An error is one line in the termination message, and a result fits into the message.
func TestReshuffleMessage(t *testing.T) {
	message := filepath.Join(t.TempDir(), "message")
	_, _, failure := runReshuffleCommand(t, "--model", "/none\nexistent", "--permutation", clitest.TinyModel+"/config.json", "--out", "x", "--termination-message", message)
	if got := readMessage(t, message); got == "" || got != oneLine(failure) || strings.Contains(got, "\n") {
		t.Errorf("termination message %q, error %q", got, failure)
	}
	for _, files := range []int{1, 400} {
		result := &reshuffle.Result{ModelDigest: strings.Repeat("a", 64), Layers: 3}
		for i := range files {
			result.LeftOut = append(result.LeftOut, fmt.Sprintf("original/%d.pth", i))
		}
		text, err := resultMessage(result)
		var told reshuffle.Result
		if err := errors.Join(err, json.Unmarshal([]byte(text), &told)); err != nil || len(text) > terminationLimit || told.Layers != 3 || (len(told.LeftOut) > 0) != (files == 1) {
			t.Errorf("%d files left out: %v, %d bytes: %.100s", files, err, len(text), text)
		}
		if len(result.LeftOut) != files {
			t.Errorf("the result lost omitted files: %d of %d", len(result.LeftOut), files)
		}
	}
}
