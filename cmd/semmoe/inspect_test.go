// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// smallModel has a tensor for its output projection.
const smallModel = "../../test/models/small-qwen3moe"

// runInspect returns the exit code, standard output and the termination message.
func runInspect(t *testing.T, args ...string) (code int, out, message string) {
	t.Helper()
	code, out, _, message = runInspectWithErrors(t, args...)
	return code, out, message
}

// runInspectWithErrors also returns standard error.
func runInspectWithErrors(t *testing.T, args ...string) (code int, out, errors, message string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "termination-log")
	cmd := newInspectCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	var stdout, stderr bytes.Buffer
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	cmd.SetArgs(append(args, "--termination-message", file))
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		code = cli.ExitCode(err)
	}
	text, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return code, stdout.String(), stderr.String(), string(text)
}

// SGLang 0.5.17 computes logits of 0 for a Qwen3-MoE checkpoint with tied embeddings.
func TestInspectWarnsOfTiedEmbeddings(t *testing.T) {
	for model, tied := range map[string]bool{clitest.TinyModel: true, smallModel: false} {
		code, out, warning, _ := runInspectWithErrors(t, "--model-path", model)
		if got := strings.Contains(warning, "tie_word_embeddings"); code != 0 || got != tied {
			t.Errorf("%s: exit code %d, standard error %q", model, code, warning)
		}
		if got := strings.Contains(out, `"tiedEmbeddings":true`); got != tied {
			t.Errorf("%s: %s", model, out)
		}
	}
}

func TestInspectReports(t *testing.T) {
	code, out, message := runInspect(t, "--model-path", clitest.TinyModel, "--expert-parallel-size", "4")
	if code != 0 || strings.TrimSpace(out) != message {
		t.Fatalf("exit code %d, output %q, message %q", code, out, message)
	}
	var report checkpoint.Report
	if err := json.Unmarshal([]byte(message), &report); err != nil {
		t.Fatal(err)
	}
	if report.Family != "qwen3_moe" || report.Experts != 32 || report.Shards != 3 {
		t.Errorf("report %+v", report)
	}
}

// TestInspectUnknownFamily checks that a model of an unknown type is valid, and that a stated layout is checked.
func TestInspectUnknownFamily(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(clitest.TinyModel)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, bytes.Replace(text, []byte(`"qwen3_moe"`), []byte(`"qwen9"`), 1), 0o644); err != nil {
		t.Fatal(err)
	}
	for layout, want := range map[string]checkpoint.Report{
		"":                              {Family: "unknown", ModelType: "qwen9"},
		"--layout-as=qwen3_moe":         {Family: "qwen9", LayoutAs: "qwen3_moe", Experts: 32},
		"--layout-as=mixtral":           {Family: "unknown", ModelType: "qwen9"},
		"--layout-as=qwen3_vl_moe_text": {Family: "qwen9", LayoutAs: "qwen3_vl_moe_text", Experts: 32},
	} {
		code, _, message := runInspect(t, strings.Fields("--model-path "+dir+" --expert-parallel-size 4 "+layout)...)
		var got checkpoint.Report
		if err := json.Unmarshal([]byte(message), &got); err != nil || code != 0 {
			t.Errorf("%s: exit code %d, message %q: %v", layout, code, message, err)
		}
		if got.Family != want.Family || got.ModelType != want.ModelType || got.LayoutAs != want.LayoutAs || got.Experts != want.Experts || (got.Unprofilable == "") != (want.Experts > 0) ||
			(got.Unpermutable == "") != (want.Experts > 0) || got.ModelDigest == "" {
			t.Errorf("%q: report %+v", layout, got)
		}
	}
	if code, _, message := runInspect(t, "--model-path", dir, "--layout-as", "qwen9"); code != exitInvalidModel || !strings.Contains(message, "qwen3_moe") {
		t.Errorf("unknown layout: exit code %d, message %q", code, message)
	}
}

func TestInspectReportsDataset(t *testing.T) {
	code, _, message := runInspect(t, "--model-path", clitest.TinyModel, "--dataset", clitest.WriteFile(t, "d.jsonl", "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\"}\n"))
	var report inspection.Report
	if err := json.Unmarshal([]byte(message), &report); err != nil || code != 0 {
		t.Fatalf("exit code %d, message %q: %v", code, message, err)
	}
	if report.Experts != 32 || report.Dataset == nil || report.Dataset.Requests != 2 || report.Dataset.Bytes != 33 || len(report.Dataset.Digest) != 64 {
		t.Errorf("report %+v, data set %+v", report, report.Dataset)
	}
}

func TestInspectFaults(t *testing.T) {
	truncated := t.TempDir()
	if err := os.CopyFS(truncated, os.DirFS(clitest.TinyModel)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(truncated, "model-00002-of-00003.safetensors"), 1000000); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		args []string
		want []string
	}{
		"no path":            {nil, []string{"--model-path is missing"}},
		"not there":          {[]string{"--model-path", "/nonexistent/model"}, []string{"/nonexistent/model does not exist", "check the model path"}},
		"truncated":          {[]string{"--model-path", truncated}, []string{"model-00002-of-00003.safetensors is truncated", "1000000 bytes", "2747888"}},
		"wrong size":         {[]string{"--model-path", clitest.TinyModel, "--expert-parallel-size", "5"}, []string{"5", "32 experts", "1, 2, 4, 8, 16, 32"}},
		"no data set":        {[]string{"--model-path", clitest.TinyModel, "--dataset", "/nonexistent/d.jsonl"}, []string{"data set /nonexistent/d.jsonl does not exist"}},
		"malformed data set": {[]string{"--model-path", clitest.TinyModel, "--dataset", clitest.WriteFile(t, "d.jsonl", "{\"prompt\": \"a\"}\nhello\n")}, []string{"data set", "d.jsonl", "line 2", "want {"}},
		"empty data set":     {[]string{"--model-path", clitest.TinyModel, "--dataset", clitest.WriteFile(t, "d.jsonl", "")}, []string{"data set", "the file is empty"}},
		"size zero":          {[]string{"--model-path", clitest.TinyModel, "--expert-parallel-size", "0"}, []string{"expert parallel size 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, message := runInspect(t, test.args...)
			if code != exitInvalidModel || out != "" || strings.ContainsRune(message, '\n') {
				t.Errorf("exit code %d, output %q, message %q", code, out, message)
			}
			for _, want := range test.want {
				if !strings.Contains(message, want) {
					t.Errorf("%q does not mention %q", message, want)
				}
			}
		})
	}
}
