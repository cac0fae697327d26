package calibration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// stopTime is how long the script may take to end when it is interrupted.
const stopTime = 10 * time.Second

// RunLocal runs the script on this machine, with that interpreter and those flags. What it complains of goes to complaints.
func RunLocal(ctx context.Context, python string, args []string, complaints io.Writer, tell func(Event)) (*Result, error) {
	dir, err := os.MkdirTemp("", "semmoe-calibrate-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	// A file, and no standard input: the processes for the other GPUs read it too.
	path := filepath.Join(dir, scriptKey)
	if err := os.WriteFile(path, []byte(Script), 0o600); err != nil {
		return nil, err
	}
	command := exec.CommandContext(ctx, python, append([]string{path}, args...)...)
	command.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	command.Stderr = complaints
	// The processes for the other GPUs are told too: one that lived on would hold its GPU, and the output open.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGINT) }
	command.WaitDelay = stopTime
	output, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("--python %s: %w", python, err)
	}
	result, readErr := Read(output, tell)
	_, copyErr := io.Copy(io.Discard, output) // so that the script is not held up while it ends
	waitErr := command.Wait()
	switch {
	case readErr == nil:
		return result, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(readErr, ErrUnfinished):
		return nil, errors.Join(readErr, waitErr, copyErr)
	}
	return nil, readErr
}
