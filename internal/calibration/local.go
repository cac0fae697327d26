// SPDX-License-Identifier: Apache-2.0

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

// stopTimeout limits the time that an interrupted script may take to exit.
const stopTimeout = 10 * time.Second

// RunLocal runs the script on this machine with the interpreter python and the flags args. The script's standard error
// goes to stderr, and its events to report.
func RunLocal(ctx context.Context, python string, args []string, stderr io.Writer, report func(Event)) (*Result, error) {
	dir, err := os.MkdirTemp("", "semmoe-calibrate-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	// The script must be a file, not standard input, because the processes of the other GPUs also read it.
	path := filepath.Join(dir, scriptKey)
	if err := os.WriteFile(path, []byte(Script), 0o600); err != nil {
		return nil, err
	}
	command := exec.CommandContext(ctx, python, append([]string{path}, args...)...)
	command.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	command.Stderr = stderr
	// The signal goes to the process group, because a remaining process of another GPU would occupy its GPU and keep
	// the output open.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGINT) }
	command.WaitDelay = stopTimeout
	output, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("--python %s: %w", python, err)
	}
	result, readErr := Read(output, report)
	_, copyErr := io.Copy(io.Discard, output) // an exiting script must not block on a full pipe
	waitErr := command.Wait()
	switch {
	case readErr == nil:
		return result, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(readErr, errUnfinished):
		return nil, errors.Join(readErr, waitErr, copyErr)
	}
	return nil, readErr
}
