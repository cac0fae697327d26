// SPDX-License-Identifier: Apache-2.0

// Package clitest runs commands in tests of the command lines.
package clitest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// Test data, relative to the directory of a command.
const (
	SampleTrace   = "../../solver/testdata/tiny-32e-top4.safetensors.zst"
	TinyModel     = "../../internal/refengine/testdata/tiny-qwen3moe"
	MeasuredTimes = "../../solver/cost/hardware/testdata/h200x4.json"
)

// RunJSON runs a command and returns its exit code, its one JSON object and its error message.
func RunJSON(t *testing.T, cmd *cobra.Command, args ...string) (code int, object map[string]any, message string) {
	t.Helper()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var stdout, stderr bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	cmd.SetArgs(args)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		if stdout.Len() > 0 {
			t.Errorf("a failed command wrote %q", stdout.String())
		}
		return cli.ExitCode(err), nil, err.Error()
	}
	if stderr.Len() > 0 {
		t.Errorf("progress without a terminal: %q", stderr.String())
	}
	if err := json.Unmarshal(stdout.Bytes(), &object); err != nil {
		t.Fatalf("%q: %v", stdout.String(), err)
	}
	return 0, object, ""
}

// Run runs a subcommand and returns its exit code, standard output and error message.
func Run(t *testing.T, cmd *cobra.Command, args ...string) (code int, out, message string) {
	t.Helper()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var stdout bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetErr(&stdout)
	cmd.SetArgs(append([]string{}, args...)) // an empty list, not the arguments of the test binary
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		return cli.ExitCode(err), stdout.String(), err.Error()
	}
	return 0, stdout.String(), ""
}

// SmallTrace writes a trace that every algorithm handles in milliseconds.
func SmallTrace(t *testing.T) string {
	t.Helper()
	return Created(t, tracetest.Generate(tracetest.Small, 1))
}

// Created writes a trace and returns its path.
func Created(t *testing.T, tr *trace.Trace) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trace.safetensors")
	if err := trace.Create(path, tr); err != nil {
		t.Fatal(err)
	}
	return path
}

// WriteFile writes a file and returns its path.
func WriteFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// CheckHelp rejects types in Go notation, duplicate defaults, and references to the text of another flag.
func CheckHelp(t *testing.T, root *cobra.Command) {
	twice := regexp.MustCompile(`\(default.*\(default`)
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(flag *pflag.Flag) {
			one := pflag.NewFlagSet("", pflag.ContinueOnError)
			one.AddFlag(flag)
			text := strings.ReplaceAll(one.FlagUsages(), "\n", " ")
			if kind, _ := pflag.UnquoteUsage(flag); kind == "stringToString" || strings.HasSuffix(kind, "Slice") || strings.HasSuffix(kind, "Array") ||
				twice.MatchString(text) || strings.Contains(text, "[])") || strings.Contains(text, "after that") {
				t.Errorf("%s: help of a flag: %s", cmd.CommandPath(), text)
			}
		})
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(root)
}

// CheckNamedPipes runs command lines and expects that each rejects its named pipe PIPE. A named pipe without a writer
// blocks its reader. In a command line, PLAN is a plan directory and CHECKPOINT a checkpoint whose first files are named
// pipes, and OUT is a file that does not exist.
func CheckNamedPipes(t *testing.T, newRoot func() *cobra.Command, lines ...string) {
	t.Helper()
	dir := t.TempDir()
	pipe, plan := filepath.Join(dir, "pipe.json"), filepath.Join(dir, "plan")
	checkpoint := filepath.Join(dir, "checkpoint")
	if err := errors.Join(syscall.Mkfifo(pipe, 0o600), os.Mkdir(plan, 0o700), syscall.Mkfifo(filepath.Join(plan, "manifest.json"), 0o600),
		os.Mkdir(checkpoint, 0o700), syscall.Mkfifo(filepath.Join(checkpoint, "config.json"), 0o600)); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	for _, line := range lines {
		arguments := strings.Fields(strings.NewReplacer("PIPE", pipe, "PLAN", plan, "CHECKPOINT", checkpoint, "OUT", out).Replace(line))
		t.Run(line, func(t *testing.T) {
			root := newRoot()
			root.SetArgs(arguments)
			root.SetOut(io.Discard)
			root.SetErr(io.Discard)
			if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "a named pipe") && !strings.Contains(err.Error(), "not a regular file") {
				t.Errorf("%v", err)
			}
		})
	}
}
