package main

import (
	"bytes"
	"encoding/json"
	"io"
	"log"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Invalid command lines return the exit code of usage errors before the command starts.
func TestInvalidCommandLines(t *testing.T) {
	for line, want := range map[string]struct {
		code int
		says string
	}{
		"solv --trace f": {exitUsage, "unknown flag: --trace"},
		"solv":           {exitUsage, `unknown command "solv"`},
		"router --prot":  {exitUsage, "unknown flag: --prot"},
		"inspect --path": {exitInvalidModel, "unknown flag: --path"},
		"inspect more":   {exitInvalidModel, `unknown command "more"`},
		"profile more":   {exitInvalidFile, `unknown command "more"`},
		"verify more":    {exitInvalidFile, `unknown command "more"`},
		"fetch more":     {exitInvalidFile, `unknown command "more"`},
		"probe more":     {exitInvalidFile, `unknown command "more"`},
		"calibrate more": {exitUsage, `unknown command "more"`},
		"store more":     {exitUsage, `unknown command "more"`},
	} {
		root := newRootCommand()
		root.SetArgs(strings.Fields(line))
		root.SetOut(io.Discard)
		err := root.ExecuteContext(t.Context())
		if err == nil || exitCode(err) != want.code || !strings.Contains(err.Error(), want.says) {
			t.Errorf("semmoe %s: %v; want exit code %d and %q", line, err, want.code, want.says)
		}
	}
}

// TestHelpOfFlags rejects types in Go notation, duplicate defaults, and references to the text of another flag.
func TestHelpOfFlags(t *testing.T) {
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
	walk(newRootCommand())
}

// The standard logger, which net/http uses for connections and servers without a logger, writes JSON in the format of
// the process's logger.
func TestStandardLoggerWritesJSON(t *testing.T) {
	if os.Getenv("SEMMOE_TEST_LOG") != "" {
		withLogger(t.Context(), "test")
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
