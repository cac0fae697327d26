// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Stage is argv[0] of the process that becomes a container.
const Stage = "localcluster-container"

// Mount makes a file or directory of the host visible at a path of the container.
type Mount struct {
	Source, Target string
	ReadOnly       bool
}

// Link is a symbolic link in the container's root.
type Link struct {
	Path, Target string
}

// Spec defines the program of a container and its environment.
type Spec struct {
	// Binary is the path of the static program. The container sees the program as /<base name>.
	Binary string
	// Args is the whole command line. If Args[0] contains no slash, it is searched in the directories of PATH in Env.
	Args []string
	// Env is the whole environment, as KEY=VALUE entries.
	Env []string
	// WorkingDir is created if it does not exist. An empty value means /.
	WorkingDir string
	Hostname   string
	Mounts     []Mount
	Links      []Link
	// ReadOnlyRoot makes everything except the mounts read-only.
	ReadOnlyRoot bool
	// MountPoint is an empty host directory on which the root is assembled. Containers can share it.
	MountPoint string
}

// Process is a running container.
type Process struct {
	cmd *exec.Cmd
}

// Start runs the container with its standard output and error going to output. An error means that the binary never
// ran. The error text appears in the pod's status.
func Start(spec Spec, output *os.File) (*Process, error) {
	specReader, specWriter, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer specWriter.Close()
	failureReader, failureWriter, err := os.Pipe()
	if err != nil {
		specReader.Close()
		return nil, err
	}
	defer failureReader.Close()

	cmd := &exec.Cmd{
		Path:       "/proc/self/exe",
		Args:       []string{Stage},
		Stdout:     output,
		Stderr:     output,
		ExtraFiles: []*os.File{specReader, failureWriter},
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
			Setsid:     true,
		},
	}
	err = cmd.Start()
	specReader.Close()
	failureWriter.Close()
	if err != nil {
		return nil, fmt.Errorf("failed to start the container: %w", err)
	}
	if err := json.NewEncoder(specWriter).Encode(spec); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, fmt.Errorf("failed to send the container specification: %w", err)
	}
	specWriter.Close()
	// The write end closes when the binary is executed successfully, or when the stage process ends.
	failure, err := io.ReadAll(failureReader)
	if err == nil && len(failure) == 0 {
		return &Process{cmd: cmd}, nil
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	return nil, errors.Join(err, errors.New(string(failure)))
}

// Signal sends a signal to the container's first process.
func (p *Process) Signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// Wait waits for the end of the container and returns its exit code. After a signal, the code is 128 plus the signal
// number, as container runtimes report it.
func (p *Process) Wait() int32 {
	_ = p.cmd.Wait()
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(p.cmd.ProcessState.ExitCode())
}

// RunIfAsked never returns in a process that Start created. It does nothing in other processes.
func RunIfAsked() {
	if len(os.Args) == 0 || os.Args[0] != Stage {
		return
	}
	const specFD, failureFD = 3, 4
	syscall.CloseOnExec(specFD)
	syscall.CloseOnExec(failureFD)
	err := enter(os.NewFile(specFD, "spec"))
	fmt.Fprint(os.NewFile(failureFD, "failure"), err.Error())
	os.Exit(1)
}

// enter turns the process into the container. It returns only on error.
func enter(r io.Reader) error {
	// Capabilities belong to a thread, so the same thread must drop them and execute the binary.
	runtime.LockOSThread()
	var spec Spec
	if err := json.NewDecoder(r).Decode(&spec); err != nil {
		return fmt.Errorf("failed to read the container's specification: %w", err)
	}
	if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
		return fmt.Errorf("failed to set host name %q: %w", spec.Hostname, err)
	}
	if err := buildRoot(spec); err != nil {
		return err
	}
	if err := os.Chdir(spec.workingDir()); err != nil {
		return err
	}
	program, err := lookPath(spec.Args[0], spec.Env)
	if err != nil {
		return err
	}
	if err := dropCapabilities(); err != nil {
		return err
	}
	if err := syscall.Exec(program, spec.Args, spec.Env); err != nil {
		return fmt.Errorf("exec: %q: %w", program, err)
	}
	return nil
}

// dropCapabilities removes all capabilities from the next program. Without it, the program would get all capabilities,
// including mounting and network configuration, because its user ID is 0 in the namespace.
func dropCapabilities() error {
	// Capability sets have 64 bits; EINVAL means that this kernel has no such capability.
	for c := range uintptr(64) {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("failed to drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("failed to set no_new_privs: %w", err)
	}
	return nil
}
