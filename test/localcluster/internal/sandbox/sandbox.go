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

// Stage is argv[0] of the process that turns itself into a container.
const Stage = "localcluster-container"

// Mount shows a file or directory of the outside at a path of the container.
type Mount struct {
	Source, Target string
	ReadOnly       bool
}

// Link is a symbolic link in the container's root.
type Link struct {
	Path, Target string
}

// Spec says what runs and what it sees.
type Spec struct {
	// Binary is the static program; the container sees it as /<base name>.
	Binary string
	// Args is the whole command line. Args[0] without a slash is looked for in the directories of PATH in Env.
	Args []string
	// Env is the whole environment, as KEY=VALUE.
	Env []string
	// WorkingDir is made if it does not exist; empty means /.
	WorkingDir string
	Hostname   string
	Mounts     []Mount
	Links      []Link
	// ReadOnlyRoot makes all that is not a mount read-only.
	ReadOnlyRoot bool
	// MountPoint is an empty directory of the outside on which the root is put together; containers can share it.
	MountPoint string
}

// Process is a running container.
type Process struct {
	cmd *exec.Cmd
}

// Start runs the container with its standard output and error going to output. An error means that its binary never
// ran; it is made for the reader of a pod's status.
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
		return nil, fmt.Errorf("starting the container: %w", err)
	}
	if err := json.NewEncoder(specWriter).Encode(spec); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, fmt.Errorf("handing over the container: %w", err)
	}
	specWriter.Close()
	// The write end is closed by the successful execution of the binary, or by the end of the stage.
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

// Wait waits for the end and returns the exit code; the end by a signal is 128 plus its number, as runtimes report it.
func (p *Process) Wait() int32 {
	_ = p.cmd.Wait()
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(p.cmd.ProcessState.ExitCode())
}

// RunIfAsked never returns in a process that Start made. Others it leaves alone.
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

// enter becomes the container; it returns only with an error.
func enter(r io.Reader) error {
	// Capabilities belong to a thread: the one that drops them must be the one that executes the binary.
	runtime.LockOSThread()
	var spec Spec
	if err := json.NewDecoder(r).Decode(&spec); err != nil {
		return fmt.Errorf("reading the container's specification: %w", err)
	}
	if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
		return fmt.Errorf("setting host name %q: %w", spec.Hostname, err)
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

// dropCapabilities leaves the next program without any capability: its user id is 0 in the namespace, and would
// otherwise be given all of them, those to mount and to configure the network included.
func dropCapabilities() error {
	// Capability sets have 64 bits; EINVAL means that this kernel has no such capability.
	for c := range uintptr(64) {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("dropping capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("setting no_new_privs: %w", err)
	}
	return nil
}
