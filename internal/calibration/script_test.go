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

// scripts are the programs that are measured with, from this directory.
var scripts = []string{"calibrate.py", "../../test/gpu/pipelined_moe.py"}

func python(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3 here")
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

// Without PyTorch, and without a GPU, each script says what is missing on its standard output, and that another attempt would not help.
func TestScriptsSayWhatIsMissing(t *testing.T) {
	if exec.Command(python(t), "-c", "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)").Run() == nil {
		t.Skip("there is a GPU here")
	}
	for _, script := range scripts {
		command := exec.Command(python(t), script)
		command.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
		output, err := command.Output()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 3 {
			t.Fatalf("%s: %v, want exit code 3", script, err)
		}
		var failed *ScriptError
		if _, err := Read(bytes.NewReader(output), func(Event) {}); !errors.As(err, &failed) || !strings.Contains(failed.Message, "PyTorch") {
			t.Errorf("%s: %v\n%s", script, err, output)
		}
	}
}

// With PyTorch the script runs without a GPU too: its ranks, as many as it is told, its progress and its file are the same, and only its
// times mean nothing.
func TestScriptWithoutGPU(t *testing.T) {
	if exec.Command(python(t), "-c", "import torch.distributed as d, sys; sys.exit(0 if d.is_gloo_available() else 1)").Run() != nil {
		t.Skip("there is no PyTorch with gloo here")
	}
	out := filepath.Join(t.TempDir(), "calibration.json")
	command := exec.Command(python(t), "calibrate.py", "--device=cpu", "--quick", "--gpus=3", "--only=send", "--only=all_to_all", "--only=collectives", "--out="+out)
	command.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1")
	var complaints bytes.Buffer
	command.Stderr = &complaints
	output, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, output, complaints.String())
	}
	done := 0
	told, err := Read(bytes.NewReader(output), func(e Event) { done = e.Done })
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	written, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if written.World != 3 || written.Rows != done || written.Rows != told.Rows || written.Skipped != 0 {
		t.Errorf("%d ranks, %d rows in the file, %d told, %d done, %d skipped", written.World, written.Rows, told.Rows, done, written.Skipped)
	}
}
