// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// interpreter returns a shell script that replaces Python. Its arguments are the path of the script and the flags.
func interpreter(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestRunLocal(t *testing.T) {
	seen := filepath.Join(t.TempDir(), "seen")
	python := interpreter(t, `cp "$1" `+seen+"; shift; echo \"flags $*\" >&2\ncat <<'.'\n"+start+second+last+".\n")
	var stderr bytes.Buffer
	events := 0
	result, err := RunLocal(t.Context(), python, example().Args(), &stderr, func(Event) { events++ })
	if err != nil {
		t.Fatal(err)
	}
	if string(result.JSON) != json1 || events != 2 {
		t.Errorf("%s, %d events", result.JSON, events)
	}
	if want := "flags --gpus=4 --timing=host --quick --shape=4096:14336:2:2\n"; stderr.String() != want {
		t.Errorf("%q, want %q", stderr.String(), want)
	}
	if script, err := os.ReadFile(seen); err != nil || string(script) != Script {
		t.Errorf("a different script ran: %v", err)
	}
}

func TestRunLocalFails(t *testing.T) {
	var script *scriptError
	if _, err := RunLocal(t.Context(), interpreter(t, "echo '{\"event\": \"error\", \"message\": \"no GPU\"}'; exit 3"), nil, &bytes.Buffer{}, nil); !errors.As(err, &script) || script.Message != "no GPU" {
		t.Errorf("error of the script: %v", err)
	}
	if _, err := RunLocal(t.Context(), interpreter(t, "exit 7"), nil, &bytes.Buffer{}, nil); !errors.Is(err, errUnfinished) || !strings.Contains(err.Error(), "exit status 7") {
		t.Errorf("exit without a result: %v", err)
	}
	if _, err := RunLocal(t.Context(), filepath.Join(t.TempDir(), "none"), nil, &bytes.Buffer{}, nil); err == nil || !strings.Contains(err.Error(), "--python") {
		t.Errorf("no interpreter: %v", err)
	}
}

// TestRunLocalInterrupted verifies that an interrupt ends the script and its child processes, which use the GPUs.
func TestRunLocalInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	python := interpreter(t, "echo '"+strings.TrimSpace(start)+"'; sleep 600 & wait")
	if _, err := RunLocal(ctx, python, nil, &bytes.Buffer{}, func(Event) { cancel(enough) }); !errors.Is(err, enough) {
		t.Errorf("%v, want %v", err, enough)
	}
}
