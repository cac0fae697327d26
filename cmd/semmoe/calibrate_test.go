// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
)

// calibrate runs semmoe calibrate with these arguments and standard input.
func calibrate(in string, args ...string) (output string, err error) {
	command := newCalibrateCommand()
	command.SilenceUsage, command.SilenceErrors = true, true
	var out bytes.Buffer
	command.SetIn(strings.NewReader(in))
	command.SetOut(&out)
	command.SetErr(&out)
	command.SetArgs(args)
	err = command.Execute()
	return out.String(), err
}

// Flags are validated before any access to files or the cluster.
func TestCalibrateRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"":                                  "--out, --config-map or both are required",
		"--out=x":                           "--image is missing: set it to the image of the engine; --gpus: 0 is invalid: must be 1 to 16",
		"--out=x --image=e --gpus=99":       "--gpus: 99 is invalid: must be 1 to 16",
		"--out=/nonexistent/x --local":      "--out: failed to create /nonexistent/x",
		"--out=x --local --gpus=-1":         "--gpus is -1",
		"--out=x --local --python=":         "--python is empty",
		"--out=x --local --from-log=-":      "--local, --from-log and --output are mutually exclusive",
		"-o json --image=e --gpus=1":        `--output is "json": want yaml`,
		"-o yaml --out=x":                   "read the result later with --from-log",
		"--config-map=A_B --local":          `--config-map is "A_B"`,
		"-o yaml --image=e --gpus=1 -n A":   `--namespace: "A"`,
		"-o yaml --image=e --gpus=1 --so=1": "unknown flag",
	} {
		_, err := calibrate("", strings.Fields(args)...)
		var coded interface{ ExitCode() int }
		if err == nil || !strings.Contains(err.Error(), want) || !errors.As(err, &coded) || coded.ExitCode() != cli.ExitUsage {
			t.Errorf("%s: %v, want %q and exit code %d", args, err, want, cli.ExitUsage)
		}
	}
}

func TestCalibrateManifest(t *testing.T) {
	output, err := calibrate("", strings.Fields("-o yaml --image=engine:1 --gpus=8 --node-selector=gpu=h200 --image-pull-secret=a,b")...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"kind: ConfigMap\n", "---\napiVersion: batch/v1\n", "nvidia.com/gpu: \"8\"\n", "gpu: h200\n", "- name: b\n", "namespace: default\n"} {
		if !strings.Contains(output, want) {
			t.Errorf("the manifest does not contain %q", want)
		}
	}
}

// The log of a separately applied Job yields the same file.
func TestCalibrateFromLog(t *testing.T) {
	const result = `{"version":1,"world":2,"gpu":"A","timing":"device","copy":[{}],"skipped":[{}]}`
	log := `{"event":"start","measurements":2,"world":2,"gpu":"A"}
{"event":"measured","done":1,"total":2,"section":"copy"}
{"event":"skipped","done":2,"total":2,"section":"gemm","reason":"too little GPU memory"}
{"event":"result","calibration":` + result + "}\n"
	path := filepath.Join(t.TempDir(), "c.json")
	output, err := calibrate(log, "--from-log=-", "--out="+path)
	if err != nil {
		t.Fatal(err)
	}
	want := "2 measurements on 2 x A\n1/2 copy\n2/2 gemm skipped: too little GPU memory\n2 x A: 1 measurements, 1 skipped, in " + path + "\n"
	if output != want {
		t.Errorf("%q, want %q", output, want)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != result+"\n" {
		t.Errorf("%q, %v", data, err)
	}
	if _, err := calibrate(log[:80], "--from-log=-", "--out="+path); err == nil || !strings.Contains(err.Error(), "ended without a result") {
		t.Errorf("a log that is cut off: %v", err)
	}
}
