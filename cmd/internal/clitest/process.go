// SPDX-License-Identifier: Apache-2.0

package clitest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/test/load"
)

// asCommand makes the test binary run the command itself.
const asCommand = "SEMMOE_TEST_AS_COMMAND"

// Main runs the tests of a command, or, in a process of Start, the command.
func Main(m *testing.M, command func()) {
	if os.Getenv(asCommand) != "" {
		command()
		return
	}
	os.Exit(m.Run())
}

// Process is a process of the test binary.
type Process struct {
	*exec.Cmd
	log   string
	Ended chan error
}

// Start starts the test binary as the command under test with the given arguments, and kills it when the test ends.
func Start(t *testing.T, env []string, args ...string) *Process {
	t.Helper()
	c := &Process{Cmd: exec.Command(os.Args[0], args...), log: filepath.Join(t.TempDir(), "log"), Ended: make(chan error, 1)}
	c.Env = append(append(os.Environ(), asCommand+"=1"), env...)
	output, err := os.Create(c.log)
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	c.Stdout, c.Stderr = output, output
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		c.Ended <- c.Wait()
	}()
	t.Cleanup(func() {
		c.Process.Kill() //nolint:errcheck // it may have ended
		<-waited
		if t.Failed() {
			t.Logf("output of %v:\n%s", args, c.Output(t))
		}
	})
	return c
}

// Output returns what the process has written to its standard output and standard error.
func (c *Process) Output(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(c.log)
	if err != nil {
		t.Error(err)
	}
	return string(text)
}

// endLimit is the time limit for the end of a process after a signal and its last request, for any unavailable server.
const endLimit = 2 * time.Second

// EndsInTime waits up to endLimit, scaled to the load of the machine, for the end of a process or a function. Timers of
// the code under test do not slow down on a busy machine, so the limit is exact on an idle machine, and never too short
// on a busy one.
func EndsInTime(t *testing.T, ended <-chan error) error {
	t.Helper()
	var clock load.Clock
	for begin := time.Now(); ; {
		select {
		case err := <-ended:
			t.Logf("ended after %v: %v", time.Since(begin).Round(time.Millisecond), err)
			return err
		case <-time.After(10 * time.Millisecond):
			if elapsed := clock.Elapsed(); elapsed > endLimit {
				t.Fatalf("no end within %v; %v have passed", endLimit, time.Since(begin).Round(time.Millisecond))
			}
		}
	}
}

// Terminate sends SIGTERM, waits for the end of the process, and returns its error.
func (c *Process) Terminate(t *testing.T) error {
	t.Helper()
	if err := c.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
	return EndsInTime(t, c.Ended)
}

// WaitFor waits until a condition holds. The process must not end before.
func (c *Process) WaitFor(t *testing.T, holds func() bool) {
	t.Helper()
	for !holds() {
		select {
		case err := <-c.Ended:
			c.Ended <- err
			if !holds() {
				t.Fatalf("the process has ended: %v", err)
			}
		case <-time.After(5 * time.Millisecond):
		}
	}
}
