// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
)

// Invalid command lines return the exit code of usage errors before the command starts.
func TestInvalidCommandLines(t *testing.T) {
	for line, want := range map[string]struct {
		code int
		says string
	}{
		"solv --trace f": {cli.ExitUsage, "unknown flag: --trace"},
		"solv":           {cli.ExitUsage, `unknown command "solv"`},
		"router --prot":  {cli.ExitUsage, "unknown flag: --prot"},
		"inspect --path": {exitInvalidModel, "unknown flag: --path"},
		"inspect more":   {exitInvalidModel, `unknown command "more"`},
		"profile more":   {cli.ExitInvalidFile, `unknown command "more"`},
		"verify more":    {cli.ExitInvalidFile, `unknown command "more"`},
		"fetch more":     {cli.ExitInvalidFile, `unknown command "more"`},
		"probe more":     {cli.ExitInvalidFile, `unknown command "more"`},
		"calibrate more": {cli.ExitUsage, `unknown command "more"`},
		"compare --ep 4": {cli.ExitUsage, "this command moved to semmoe-lab"},
		"engine --help":  {cli.ExitUsage, "this command moved to semmoe-refengine"},
		"store more":     {cli.ExitUsage, `unknown command "more"`},
	} {
		root := newRootCommand()
		root.SetArgs(strings.Fields(line))
		root.SetOut(io.Discard)
		err := root.ExecuteContext(t.Context())
		if err == nil || cli.ExitCode(err) != want.code || !strings.Contains(err.Error(), want.says) {
			t.Errorf("semmoe %s: %v; want exit code %d and %q", line, err, want.code, want.says)
		}
	}
}

// TestAdvisedFlagsExist checks the flags of semmoe commands that messages, pages and help texts advise.
func TestAdvisedFlagsExist(t *testing.T) {
	commandLine := regexp.MustCompile(`\bsemmoe ([a-z]+)((?: --?[a-z-]+(?: [A-Z]+\b)?)+)`)
	long, found := regexp.MustCompile(`--([a-z][a-z-]*)`), 0
	for _, folder := range []string{"cmd", "controllers", "internal", "solver", "webhook"} {
		err := filepath.WalkDir(filepath.Join("..", "..", folder), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".go" && filepath.Ext(path) != ".html" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, line := range commandLine.FindAllStringSubmatch(strings.ReplaceAll(string(text), "kubectl semmoe", ""), -1) {
				command, _, findErr := newRootCommand().Find([]string{line[1]})
				if findErr != nil {
					t.Errorf("%s: %q: %v", path, line[0], findErr)
					continue
				}
				for _, flag := range long.FindAllStringSubmatch(line[2], -1) {
					if found++; command.Flag(flag[1]) == nil {
						t.Errorf("%s: %q: the command has no flag --%s", path, line[0], flag[1])
					}
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found < 8 {
		t.Errorf("found only %d flags", found)
	}
}

func TestHelpOfFlags(t *testing.T) { clitest.CheckHelp(t, newRootCommand()) }

// The standard logger, which net/http uses for connections and servers without a logger, writes JSON in the format of
// the process's logger.
func TestStandardLoggerWritesJSON(t *testing.T) {
	if os.Getenv("SEMMOE_TEST_LOG") != "" {
		cli.WithLogger(t.Context(), "test", 0)
		log.Printf("Unsolicited response received on idle HTTP channel")
		return
	}
	command := exec.Command(os.Args[0], "-test.run=^TestStandardLoggerWritesJSON$")
	command.Env = append(os.Environ(), "SEMMOE_TEST_LOG=1")
	var lines bytes.Buffer
	command.Stderr = &lines
	if err := command.Run(); err != nil {
		t.Fatal(err)
	}
	var line struct {
		Logger string `json:"logger"`
		Msg    string `json:"msg"`
	}
	if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.Logger != "test" || !strings.HasPrefix(line.Msg, "Unsolicited response") {
		t.Errorf("logged %s: %v", lines.Bytes(), err)
	}
}
