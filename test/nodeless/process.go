package nodeless

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

// Process is a program that runs until Stop, or until the test process ends, however that ends.
type Process struct {
	log   string
	cmd   *exec.Cmd
	ended chan struct{}
	err   error // of Wait; set before ended is closed
}

// Spawn starts a program whose output goes to the file log. env is added to the environment.
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
		// The kernel ends the program when the thread that started it ends, so this thread must live as long.
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

// Ended is closed when the program has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Log is the file with the program's output.
func (p *Process) Log() string { return p.log }

// Stop asks the program to end, and waits for that. Its error names the log of a program that had ended by itself.
func (p *Process) Stop() error {
	select {
	case <-p.ended:
		text, _ := os.ReadFile(p.log)
		return fmt.Errorf("%s had ended by itself (%v): %s", p.cmd.Path, p.err, text[max(0, len(text)-2000):])
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
		return fmt.Errorf("%s did not end within 30 s of being asked to", p.cmd.Path)
	}
	return nil
}

// Usage is what a process has used so far.
type Usage struct {
	// User and System are CPU times.
	User, System time.Duration
	// Resident is the memory in bytes that it has now, Peak the most that it ever had.
	Resident, Peak int64
}

// CPU is the sum of both times.
func (u Usage) CPU() time.Duration { return u.User + u.System }

// Usage reads what the process has used, from /proc.
func (p *Process) Usage() (Usage, error) {
	directory := fmt.Sprintf("/proc/%d/", p.cmd.Process.Pid)
	stat, err := os.ReadFile(directory + "stat")
	if err != nil {
		return Usage{}, err
	}
	// The second field is the program's name in parentheses; what follows is separated by single blanks (proc(5)).
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
