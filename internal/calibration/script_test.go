// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// scripts are the paths of the measuring programs, relative to this directory.
var scripts = []string{"calibrate.py", "../../test/gpu/pipelined_moe.py"}

func python(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	return path
}

func TestScriptsCompile(t *testing.T) {
	for _, script := range scripts {
		command := exec.Command(python(t), "-c", "import sys; compile(open(sys.argv[1], encoding='utf-8').read(), sys.argv[1], 'exec')", script)
		if output, err := command.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", script, err, output)
		}
	}
}

// TestScriptsReportMissingRequirements verifies that each script reports missing PyTorch or GPUs on standard output,
// with the exit code for errors that a retry does not fix.
func TestScriptsReportMissingRequirements(t *testing.T) {
	if exec.Command(python(t), "-c", "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)").Run() == nil {
		t.Skip("this machine has a GPU")
	}
	for _, script := range scripts {
		command := exec.Command(python(t), script)
		command.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
		output, err := command.Output()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 3 {
			t.Fatalf("%s: %v, want exit code 3", script, err)
		}
		var failed *scriptError
		if _, err := Read(bytes.NewReader(output), func(Event) {}); !errors.As(err, &failed) || !strings.Contains(failed.Message, "PyTorch") {
			t.Errorf("%s: %v\n%s", script, err, output)
		}
	}
}

// TestScriptWithoutGPU runs the script with PyTorch on the CPU. Ranks, progress and file are as with GPUs. Only the
// times are meaningless.
func TestScriptWithoutGPU(t *testing.T) {
	if exec.Command(python(t), "-c", "import torch.distributed as d, sys; sys.exit(0 if d.is_gloo_available() else 1)").Run() != nil {
		t.Skip("PyTorch with gloo is not installed")
	}
	out := filepath.Join(t.TempDir(), "calibration.json")
	command := exec.Command(python(t), "calibrate.py", "--device=cpu", "--quick", "--gpus=3", "--only=send", "--only=all_to_all", "--only=collectives", "--out="+out)
	command.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1")
	var stderr bytes.Buffer
	command.Stderr = &stderr
	output, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, output, stderr.String())
	}
	done := 0
	result, err := Read(bytes.NewReader(output), func(e Event) { done = e.Done })
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	written, err := parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if written.World != 3 || written.Rows != done || written.Rows != result.Rows || written.Skipped != 0 {
		t.Errorf("%d ranks, %d rows in the file, %d in the output, %d done, %d skipped", written.World, written.Rows, result.Rows, done, written.Skipped)
	}
}
