package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// An engine's pod that has no store to ask starts without the plan, and says why; a fault of the flags is none of the store's.
func TestFetchWithoutStore(t *testing.T) {
	t.Setenv("SEMMOE_STORE_URL", "")
	digest := strings.Repeat("ab", 32)
	for name, tc := range map[string]struct {
		args []string
		code int // 0: no failure
		says string
	}{
		"needed":          {[]string{"--namespace=ns", "--plan-digest=" + digest}, 1, "SEMMOE_STORE_URL"},
		"optional":        {[]string{"--namespace=ns", "--plan-digest=" + digest, "--optional"}, 0, "SEMMOE_STORE_URL"},
		"no namespace":    {[]string{"--plan-digest=" + digest, "--optional"}, exitInvalidFile, "--namespace is missing"},
		"a short digest":  {[]string{"--namespace=ns", "--plan-digest=abc", "--optional"}, exitInvalidFile, "--plan-digest"},
		"a negative wait": {[]string{"--namespace=ns", "--plan-digest=" + digest, "--wait=-1s"}, exitInvalidFile, "--wait is -1s"},
		"no such flag":    {[]string{"--nothing"}, exitInvalidFile, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			out, message := filepath.Join(dir, "plan"), filepath.Join(dir, "message")
			command := newFetchCommand()
			command.SilenceErrors, command.SilenceUsage = true, true
			command.SetErr(&bytes.Buffer{})
			command.SetArgs(append([]string{"--out=" + out, "--termination-message=" + message}, tc.args...))
			err := command.ExecuteContext(t.Context())
			if (err == nil) != (tc.code == 0) || err != nil && exitCode(err) != tc.code {
				t.Errorf("ends with %v, want code %d", err, tc.code)
			}
			told, _ := os.ReadFile(message)
			if !strings.Contains(string(told), tc.says) {
				t.Errorf("tells %q, want %q", told, tc.says)
			}
			if _, err := os.Stat(out); !os.IsNotExist(err) {
				t.Errorf("left behind: %v", err)
			}
		})
	}
}

// What a plan takes the place of is removed: a directory with anything else is refused before the store is asked.
func TestFetchLeavesOtherDirectories(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "thesis.txt")
	if err := os.WriteFile(precious, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	flags := fetchFlags{namespace: "ns", planDigest: strings.Repeat("ab", 32), out: dir}
	if err := flags.check(); exitCode(err) != exitInvalidFile || !strings.Contains(err.Error(), "--out: "+dir+" is not empty and holds no plan") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}
