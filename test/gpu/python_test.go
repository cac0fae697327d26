// SPDX-License-Identifier: Apache-2.0

// Package gpu_test tests the parts of the Python programs that need no GPU.
package gpu_test

import (
	"os/exec"
	"path/filepath"
	"testing"
)

const consumer = "../../docs/integrations/torch"

// python runs the interpreter without writing compiled files. Without python3 the test is skipped.
func python(t *testing.T, folder string, arguments ...string) {
	t.Helper()
	interpreter, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	command := exec.CommandContext(t.Context(), interpreter, append([]string{"-B"}, arguments...)...)
	command.Dir = folder
	if out, err := command.CombinedOutput(); err != nil {
		t.Errorf("%v: %v\n%s", command.Args, err, out)
	}
}

// TestConsumer runs the tests of the token-shuffle consumer. Without PyTorch only the tests of the reader run.
func TestConsumer(t *testing.T) { python(t, consumer, "-m", "unittest", "discover", "-s", "tests") }

// TestProgramsParse finds syntax errors before a program is run on GPUs.
func TestProgramsParse(t *testing.T) {
	files := []string{"-c", "import ast, sys\nfor name in sys.argv[1:]: ast.parse(open(name, encoding='utf-8').read(), name)"}
	for _, pattern := range []string{"*.py", consumer + "/*/*.py"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %v, %v", pattern, found, err)
		}
		files = append(files, found...)
	}
	python(t, ".", files...)
}
