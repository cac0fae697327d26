// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/hub/report"
	"github.com/semmoe/operator/test/hub"
)

// TestDownloadCommand downloads a checkpoint from a hub and inspects it. Errors are the termination message, and contain no
// token.
func TestDownloadCommand(t *testing.T) {
	const token = "hf_command"
	repo := hub.NewRepo("0123456789abcdef0123456789abcdef01234567")
	repo.Gated = true
	if err := hub.AddDirectory(repo, clitest.TinyModel); err != nil {
		t.Fatal(err)
	}
	server := &hub.Server{Repos: map[string]*hub.Repo{"org/tiny": repo}, Accounts: map[string]hub.Account{token: {Accepted: true}}, PageSize: 3}
	contents, front := httptest.NewServer(server.Contents()), httptest.NewServer(server)
	t.Cleanup(contents.Close)
	t.Cleanup(front.Close)
	server.ContentURL = contents.URL
	dir := t.TempDir()
	out := filepath.Join(dir, "models", "tiny")
	run := func(token string, args ...string) (code int, stdout, stderr, message string) {
		t.Helper()
		t.Setenv("HF_TOKEN", token)
		file := filepath.Join(t.TempDir(), "message")
		command := newDownloadCommand()
		command.SilenceErrors, command.SilenceUsage = true, true
		var text, errors bytes.Buffer
		command.SetOut(&text)
		command.SetErr(&errors)
		command.SetArgs(append([]string{"--termination-message=" + file, "--endpoint=" + front.URL}, args...))
		if err := command.ExecuteContext(t.Context()); err != nil {
			code = cli.ExitCode(err)
		}
		written, err := os.ReadFile(file)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return code, text.String(), errors.String(), string(written)
	}
	for name, tc := range map[string]struct {
		token string
		args  []string
		code  int
		want  string
	}{
		"no repository":    {"", []string{"--out=" + out}, 2, "--repo is missing"},
		"no directory":     {"", []string{"--repo=org/tiny"}, 2, "--out is missing"},
		"no connections":   {"", []string{"--repo=org/tiny", "--out=" + out, "--connections=0"}, 2, "--connections is 0"},
		"invalid endpoint": {"", []string{"--repo=org/tiny", "--out=" + out, "--endpoint=hub"}, 2, "--endpoint"},
		"unknown":          {token, []string{"--repo=org/other", "--out=" + out}, 3, "the repository does not exist"},
		"gated":            {"", []string{"--repo=org/tiny", "--out=" + out}, 3, "Accept its terms"},
		"not writable":     {token, []string{"--repo=org/tiny", "--out=/proc/models/tiny"}, 1, "/proc/models"},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr, message := run(tc.token, tc.args...)
			if code != tc.code || !strings.Contains(message, tc.want) || stdout != "" {
				t.Errorf("exit code %d, message %q, output %q; want %d and %q", code, message, stdout, tc.code, tc.want)
			}
			if strings.Contains(message+stderr, token) {
				t.Error("the token is in the output")
			}
		})
	}
	code, stdout, _, message := run(token+"\n", "--repo=org/tiny", "--out="+out)
	var result report.Result
	if err := json.Unmarshal([]byte(message), &result); code != 0 || err != nil || strings.TrimSpace(stdout) != message || result.Downloaded != result.Bytes || result.Bytes == 0 {
		t.Fatalf("exit code %d, message %q, output %q (%v)", code, message, stdout, err)
	}
	want, err := checkpoint.Inspect(clitest.TinyModel)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := checkpoint.Inspect(out); err != nil || got.ModelDigest != want.ModelDigest {
		t.Errorf("the downloaded checkpoint has digest %s (%v), want %s", got.ModelDigest, err, want.ModelDigest)
	}
	if code, _, _, message := run("", "--repo=org/tiny", "--out="+out); code != 0 || !strings.Contains(message, `"found":true`) {
		t.Errorf("a second run without a token: exit code %d, message %q", code, message)
	}
}
