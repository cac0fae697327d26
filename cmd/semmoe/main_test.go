// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"log"
	"os"
	"os/exec"
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
