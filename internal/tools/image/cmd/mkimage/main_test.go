// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// buildProgram compiles a static program, like the program of a release image.
func buildProgram(t *testing.T, directory string) string {
	t.Helper()
	source := filepath.Join(directory, "hello.go")
	if err := os.WriteFile(source, []byte("package main\n\nfunc main() { println(\"hello\") }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(directory, "hello")
	build := exec.Command("go", "build", "-trimpath", "-o", program, source)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	return program
}

func TestRun(t *testing.T) {
	directory := t.TempDir()
	program := buildProgram(t, directory)
	out := filepath.Join(directory, "out", "hello.tar")
	if err := os.Mkdir(filepath.Dir(out), 0o700); err != nil {
		t.Fatal(err)
	}
	mkimage := func(arguments ...string) (string, error) {
		var stdout bytes.Buffer
		err := run(append(arguments, "--binary", program, "--out", out), &stdout, io.Discard)
		return stdout.String(), err
	}
	first, err := mkimage("--name", "hello:dev")
	if err != nil {
		t.Fatal(err)
	}
	if hex, found := strings.CutPrefix(strings.TrimSpace(first), "sha256:"); !found || len(hex) != 64 {
		t.Errorf("printed %q, want sha256:<64 hex digits>", first)
	}
	before, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mkimage("--name", "hello"); err == nil {
		t.Error("a name without a tag was accepted")
	}
	second, err := mkimage("--name", "hello:dev")
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if first != second || !bytes.Equal(before, after) {
		t.Errorf("a second run built a different image: %s, then %s", first, second)
	}
	entries, err := os.ReadDir(filepath.Dir(out))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if diff := cmp.Diff([]string{"hello.tar"}, names); diff != "" {
		t.Errorf("files left (-want +got):\n%s", diff)
	}
}

func TestRunRejectsInvalidArguments(t *testing.T) {
	tests := map[string]struct {
		arguments []string
		want      string
	}{
		"no program":     {[]string{"--name", "a:b", "--out", "a.tar"}, "--binary is missing"},
		"no name":        {[]string{"--binary", "a", "--out", "a.tar"}, "--name is missing"},
		"no output":      {[]string{"--binary", "a", "--name", "a:b"}, "--out is missing"},
		"absent program": {[]string{"--binary", "/nonexistent/a", "--name", "a:b", "--out", "a.tar"}, "--binary: open /nonexistent/a"},
		"stray argument": {[]string{"--binary", "a", "b"}, `unexpected argument "b"`},
		"unknown option": {[]string{"--tag", "a"}, "flag provided but not defined"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := run(test.arguments, io.Discard, io.Discard)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}
