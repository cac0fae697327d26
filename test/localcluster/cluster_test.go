// SPDX-License-Identifier: Apache-2.0

package localcluster

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
)

// TestKilledParent kills the program that started a cluster. Every process must end, and the directory must be
// available for the next cluster.
func TestKilledParent(t *testing.T) {
	needCluster(t)
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), parentDir+"="+dir)
	parent.Stderr = os.Stderr
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "up\n" {
		t.Fatalf("the parent printed %q (%v)", line, err)
	}
	if n := len(processesNaming(t, dir)); n < 4 {
		t.Errorf("%d processes have the state directory in their command lines, want the 4 of the control plane", n)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	eventually(t, 5*time.Second, func() error {
		if left := processesNaming(t, dir); len(left) > 0 {
			return fmt.Errorf("processes still run: %q", left)
		}
		return nil
	})
	var next *stateDir
	eventually(t, 5*time.Second, func() (err error) {
		next, err = openStateDir(dir)
		return err
	})
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("the directory contains %v (%v), want only the lock and new logs", entries, err)
	}
	if err := next.close(); err != nil {
		t.Error(err)
	}
}

func TestRefusedNamespaces(t *testing.T) {
	needCluster(t)
	t.Parallel()
	program := exec.Command("/proc/self/exe")
	program.Env = append(os.Environ(), refusedDir+"="+t.TempDir())
	program.SysProcAttr = namespaces()
	program.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER
	out, err := program.CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(out), "true ") || !strings.Contains(string(out), "user.max_user_namespaces") {
		t.Errorf("got %q, want an error with the sysctls to check", out)
	}
}

// processesNaming returns the command lines that contain the text.
func processesNaming(t *testing.T, text string) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var result []string
	for _, path := range paths {
		// A process may have ended since the listing.
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), text) {
			result = append(result, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return result
}

func TestStateDir(t *testing.T) {
	t.Parallel()
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "precious"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := openStateDir(foreign); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("error for a directory of another owner: %v, want one with %q", err, "not empty")
	}
	if _, err := os.Stat(filepath.Join(foreign, "precious")); err != nil {
		t.Error(err)
	}
	own := filepath.Join(t.TempDir(), "own")
	first, err := openStateDir(own)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openStateDir(own); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("error for a directory in use: %v, want one with %q", err, "in use")
	}
	locked := filepath.Join(own, "locked")
	if err := os.Mkdir(locked, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(locked, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(locked, 0o500); err != nil {
		t.Fatal(err)
	}
	if err := first.close(); err != nil {
		t.Fatal(err)
	}
	again, err := openStateDir(own)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(locked); err == nil {
		t.Error("the old state was kept")
	}
	if err := again.close(); err != nil {
		t.Error(err)
	}
	temporary, err := openStateDir("")
	if err != nil {
		t.Fatal(err)
	}
	if err := temporary.close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(temporary.path); err == nil {
		t.Error("the temporary directory was kept")
	}
}

func TestOptionsAreValidated(t *testing.T) {
	t.Parallel()
	binaries := t.TempDir()
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		if err := os.WriteFile(filepath.Join(binaries, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script := filepath.Join(binaries, "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		options Options
		want    string
	}{
		"no binaries":    {Options{Binaries: t.TempDir()}, "make controlplane"},
		"negative GPUs":  {Options{Binaries: binaries, GPUs: -1}, "GPUs is -1"},
		"negative ports": {Options{Binaries: binaries, Forward: -1}, "Forward is -1"},
		"relative image": {Options{Binaries: binaries, Images: map[string]string{"a:1": "app"}}, "not an absolute path"},
		"no program":     {Options{Binaries: binaries, Images: map[string]string{"a:1": script}}, "not a Linux program"},
	} {
		if _, err := Start(t.Context(), test.options); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, test.want)
		}
	}
}
