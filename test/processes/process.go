// SPDX-License-Identifier: Apache-2.0

package processes

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Process is a child process that runs until Stop or until the process that started it ends in any way.
type Process struct {
	log   string
	cmd   *exec.Cmd
	ended chan struct{}
	err   error // of Wait; set before ended is closed
}

// Spawn starts a program and writes its output to the file log. env is added to the environment.
func Spawn(log string, env []string, path string, args ...string) (*Process, error) {
	output, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer output.Close()
	p := &Process{log: log, cmd: exec.Command(path, args...), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = output, output
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig kills the program when the thread that started it ends, so this thread must outlive the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.ended)
		}
	}()
	return p, <-started
}

// Ended returns a channel that is closed when the program has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Log returns the path of the file with the program's output.
func (p *Process) Log() string { return p.log }

// Stop sends SIGTERM to the program, waits up to 30 s for its end, and then kills it. If the program had already ended,
// the error contains the end of its log.
func (p *Process) Stop() error {
	select {
	case <-p.ended:
		text, _ := os.ReadFile(p.log)
		return fmt.Errorf("%s had already ended (%v): %s", p.cmd.Path, p.err, text[max(0, len(text)-2000):])
	default:
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.ended:
	case <-time.After(30 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.ended
		return fmt.Errorf("%s did not end within 30 s after SIGTERM", p.cmd.Path)
	}
	return nil
}

// Usage is the resource usage of a process.
type Usage struct {
	// User and System are CPU times.
	User, System time.Duration
	// Resident is the current resident memory in bytes. Peak is the maximum resident memory in bytes.
	Resident, Peak int64
}

// CPU returns the sum of user and system time.
func (u Usage) CPU() time.Duration { return u.User + u.System }

// Usage reads the resource usage of the process from /proc.
func (p *Process) Usage() (Usage, error) {
	directory := fmt.Sprintf("/proc/%d/", p.cmd.Process.Pid)
	stat, err := os.ReadFile(directory + "stat")
	if err != nil {
		return Usage{}, err
	}
	// The second field is the program's name in parentheses. Single spaces separate the fields after it (proc(5)).
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	ticks := func(i int) time.Duration {
		n, parseErr := strconv.ParseInt(fields[i], 10, 64)
		err = errors.Join(err, parseErr)
		return time.Duration(n) * time.Second / 100 // USER_HZ
	}
	usage := Usage{User: ticks(11), System: ticks(12)}
	status, readErr := os.ReadFile(directory + "status")
	err = errors.Join(err, readErr)
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "VmRSS" && name != "VmHWM" {
			continue
		}
		kilobytes, parseErr := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		err = errors.Join(err, parseErr)
		if name == "VmRSS" {
			usage.Resident = kilobytes << 10
		} else {
			usage.Peak = kilobytes << 10
		}
	}
	return usage, err
}
