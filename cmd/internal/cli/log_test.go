// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
)

// TestLogLevel checks that --log-level selects the messages of the logger by verbosity.
func TestLogLevel(t *testing.T) {
	for _, c := range []struct {
		args    []string
		enabled int
	}{{nil, 0}, {[]string{"--log-level=1"}, 1}, {[]string{"--log-level=9"}, maxLogLevel}} {
		var level int
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		LogLevelFlag(flags, &level)
		if err := flags.Parse(c.args); err != nil {
			t.Fatal(err)
		}
		log := logr.FromContextOrDiscard(WithLogger(t.Context(), "test", level))
		if !log.V(c.enabled).Enabled() || log.V(c.enabled+1).Enabled() {
			t.Errorf("%v: the logger does not stop at verbosity %d", c.args, c.enabled)
		}
	}
	for _, invalid := range []string{"10", "-1", "debug", ""} {
		var level int
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		LogLevelFlag(flags, &level)
		if err := flags.Parse([]string{"--log-level=" + invalid}); err == nil || !strings.Contains(err.Error(), "0 to 9") {
			t.Errorf("--log-level=%s: error %v, want one that names the allowed numbers", invalid, err)
		}
	}
}

// TestQuotedTextIsPrintable checks that errors and logs, which quote engines, checkpoints and servers, contain no
// character that controls a terminal or changes the direction of text.
func TestQuotedTextIsPrintable(t *testing.T) {
	const quoted = "the engine: \x1b[2J\u009b1A \u202egnp.exe"
	var printed bytes.Buffer
	PrintError(&printed, "semmoe", errors.New(quoted+"\nmore"))
	file, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	defer WithLogger(t.Context(), "test", 0) // other tests log to the actual standard error again
	stderr := os.Stderr
	os.Stderr = file
	log := logr.FromContextOrDiscard(WithLogger(t.Context(), "test", 0))
	os.Stderr = stderr
	log.Info("Quoted", "text", quoted)
	logged, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	var line struct{ Text string }
	if err := json.Unmarshal(logged, &line); err != nil || line.Text != quoted {
		t.Errorf("logged %q, %v; want the text %q", logged, err, quoted)
	}
	for name, text := range map[string]string{"error": printed.String(), "log": string(logged)} {
		if strings.ContainsFunc(strings.ReplaceAll(text, "\n", ""), func(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf) }) {
			t.Errorf("%s with control characters: %q", name, text)
		}
	}
}
