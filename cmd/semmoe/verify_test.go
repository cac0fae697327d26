// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// mountPlan solves a plan for the small model and writes its ConfigMap in the form of a mounted volume.
func mountPlan(t *testing.T, model checkpoint.Report) (dir, digest string) {
	t.Helper()
	recorded, err := trace.Open(t.Context(), "../../solver/testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	recorded.Model.Digest = model.ModelDigest
	solution, err := solver.Solve(t.Context(), recorded, solver.Options{
		Ranks: 4, Attention: placement.DataParallel, Algorithm: placement.ContiguousAlgorithm, Forecast: solver.Table, TrainPercent: 80, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	a, err := plan.Encode(solution.Plan)
	if err != nil {
		t.Fatal(err)
	}
	data, err := bundle.ConfigMapData(a, "SGLang")
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	for key, value := range data {
		if err := os.WriteFile(filepath.Join(dir, key), []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir, a.Digest
}

func TestVerify(t *testing.T) {
	model, err := checkpoint.Inspect(clitest.TinyModel)
	if err != nil {
		t.Fatal(err)
	}
	dir, digest := mountPlan(t, model)
	other := strings.Repeat("0", 64)
	changed := t.TempDir()
	if err := os.CopyFS(changed, os.DirFS(clitest.TinyModel)); err != nil {
		t.Fatal(err)
	}
	config, err := os.ReadFile(filepath.Join(changed, "config.json"))
	if err == nil {
		err = os.WriteFile(filepath.Join(changed, "config.json"), append(config, '\n'), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	const absent = "absent" // for an unset flag
	for name, test := range map[string]struct {
		change map[string]string
		want   string
	}{
		"fits":            {},
		"other plan":      {map[string]string{"--plan-digest": other}, "contains plan " + digest},
		"other model":     {map[string]string{"--model-digest": other}, "is for model"},
		"model changed":   {map[string]string{"--model-path": changed}, "the model changed after it was profiled"},
		"model gone":      {map[string]string{"--model-path": "/nonexistent"}, "/nonexistent does not exist"},
		"nothing mounted": {map[string]string{"--plan-dir": t.TempDir()}, "check that the ConfigMap of the plan is mounted there"},
		"EP size":         {map[string]string{"--expert-parallel-size": "8"}, "EP size 4; the engine has 8"},
		"no EP size":      {map[string]string{"--expert-parallel-size": "0"}, "--expert-parallel-size is 0"},
		"empty digest":    {map[string]string{"--plan-digest": ""}, "--plan-digest is empty"},
		"empty model":     {map[string]string{"--model-digest": ""}, "--model-digest is empty"},
		"any plan":        {map[string]string{"--plan-digest": absent, "--model-digest": absent}, ""},
		"any plan, other model": {
			map[string]string{"--plan-digest": absent, "--model-digest": absent, "--model-path": changed}, "the model changed after it was profiled",
		},
		"EP size is a word": {map[string]string{"--expert-parallel-size": "four"}, "four"},
	} {
		t.Run(name, func(t *testing.T) {
			message := filepath.Join(t.TempDir(), "termination-log")
			command := newVerifyCommand()
			command.SilenceErrors, command.SilenceUsage = true, true
			var stdout bytes.Buffer
			command.SetOut(&stdout)
			args := []string{"--termination-message=" + message}
			for flag, value := range map[string]string{
				"--plan-dir": dir, "--plan-digest": digest, "--model-path": clitest.TinyModel, "--model-digest": model.ModelDigest, "--expert-parallel-size": "4",
			} {
				if changed, ok := test.change[flag]; ok {
					value = changed
				}
				if value == absent {
					continue
				}
				args = append(args, flag+"="+value)
			}
			command.SetArgs(args)
			err := command.ExecuteContext(t.Context())
			if test.want == "" {
				if err != nil || !strings.Contains(stdout.String(), digest) {
					t.Errorf("%v, %q", err, stdout.String())
				}
				return
			}
			if err == nil || cli.ExitCode(err) != cli.ExitInvalidFile || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("exit code %d, %v; want %d, %q", cli.ExitCode(err), err, cli.ExitInvalidFile, test.want)
			}
			if name == "EP size is a word" { // the flags were not parsed, so the message file is unknown
				return
			}
			if text, readErr := os.ReadFile(message); readErr != nil || string(text) != err.Error() {
				t.Errorf("termination message %q, %v", text, readErr)
			}
		})
	}
}
