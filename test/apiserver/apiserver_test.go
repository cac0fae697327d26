// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/tier"
)

// parent is the environment variable that is set for a copy of this test program that only starts an API server and
// waits to be killed.
const parent = "APISERVER_TEST_PARENT"

func TestMain(m *testing.M) {
	if os.Getenv(parent) != "" {
		startAndWait()
	}
	if _, err := localcluster.FindBinaries(); err != nil {
		os.Exit(tier.ExitCode(err))
	}
	os.Exit(m.Run())
}

func startAndWait() {
	if _, err := Start(&envtest.Environment{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("up")
	select {}
}

// processes returns the command lines that contain the text.
func processes(t *testing.T, text string) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, path := range paths {
		// A process may have ended since the listing.
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), text) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// expect waits up to 10 s until the number of processes with the directory in their command lines is want. If want is
// 0, it also waits until the directory is empty.
func expect(t *testing.T, directory string, want int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		found := processes(t, directory)
		left, err := os.ReadDir(directory)
		if err != nil {
			t.Fatal(err)
		}
		if len(found) == want && (want > 0 || len(left) == 0) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes %q, files %v, want %d processes", found, left, want)
		}
	}
}

// TestKilledParent verifies that the processes of the API server end, and that no files remain, when the process that
// started them ends through a signal.
func TestKilledParent(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "interrupted": syscall.SIGINT, "timed out": syscall.SIGQUIT} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			program := exec.Command("/proc/self/exe")
			program.Env = append(os.Environ(), parent+"=1", "TMPDIR="+directory)
			program.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			out, err := program.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := program.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "up\n" {
				t.Fatalf("the program printed %q: %v", line, err)
			}
			expect(t, directory, 2)
			// The signal goes to the whole process group, as from a terminal.
			if err := syscall.Kill(-program.Process.Pid, signal); err != nil {
				t.Fatal(err)
			}
			_ = program.Wait()
			expect(t, directory, 0)
		})
	}
}

func TestStop(t *testing.T) {
	directory := t.TempDir()
	t.Setenv("TMPDIR", directory)
	server, err := Start(&envtest.Environment{})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, directory, 2)
	if err := server.Stop(); err != nil {
		t.Error(err)
	}
	expect(t, directory, 0)
}

func TestStartFails(t *testing.T) {
	directory := t.TempDir()
	t.Setenv("TMPDIR", directory)
	missing := &envtest.Environment{CRDDirectoryPaths: []string{filepath.Join(directory, "nowhere")}, ErrorIfCRDPathMissing: true}
	if _, err := Start(missing); err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("error %v, want one that names the path", err)
	}
	expect(t, directory, 0)
}
