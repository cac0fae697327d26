// SPDX-License-Identifier: Apache-2.0

// Package apiserver starts only etcd and an API server, for tests that need no controllers and no nodes. Both end when
// the process that started them ends, in any way. envtest does not ensure this: it starts both in separate process
// groups, so neither Ctrl-C nor a test timeout would end them.
package apiserver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/localcluster"
)

// Server is a running API server. Its Config has administrator permissions.
type Server struct {
	*envtest.Environment
	guard *exec.Cmd
	alive io.Closer // the guard acts when alive is closed or this process has ended
}

// Start starts the configured environment with the programs that localcluster.FindBinaries returns. Start is slow.
func Start(environment *envtest.Environment) (*Server, error) {
	binaries, err := localcluster.FindBinaries()
	if err != nil {
		return nil, err
	}
	directory, err := os.MkdirTemp("", "apiserver-")
	if err != nil {
		return nil, err
	}
	s := &Server{Environment: environment}
	if err := s.watch(directory); err != nil {
		return nil, errors.Join(err, os.RemoveAll(directory))
	}
	if err := s.start(binaries, directory); err != nil {
		return nil, errors.Join(fmt.Errorf("failed to start the API server: %w", err), s.Stop())
	}
	return s, nil
}

func (s *Server) start(binaries, directory string) error {
	etcd, api := filepath.Join(directory, "etcd"), filepath.Join(directory, "kube-apiserver")
	for _, d := range []string{etcd, api} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
	}
	s.BinaryAssetsDirectory = binaries
	s.ControlPlaneStartTimeout, s.ControlPlaneStopTimeout = load.Scale(time.Minute), load.Scale(time.Minute)
	s.CRDInstallOptions.MaxTime = load.Scale(30 * time.Second)
	s.ControlPlane.Etcd = &envtest.Etcd{DataDir: etcd}
	s.ControlPlane.GetAPIServer().CertDir = api
	if _, err := s.Environment.Start(); err != nil {
		return err
	}
	return s.WebhookInstallOptions.Cleanup() // removes unused webhook certificates outside the directory
}

// guard is a shell script that waits for the end of its input. Then it kills every process with the directory in its
// command line until none is left, and removes the directory. The command line of the guard does not contain the
// directory.
const guard = `
read -r _
while files=$(echo "=$DIRECTORY/" | grep -lsFf - /proc/[0-9]*/cmdline); [ -n "$files" ]; do
  for file in $files; do
    file=${file#/proc/}
    kill -KILL "${file%/cmdline}"
  done
  sleep 0.1
done
exec rm -rf "$DIRECTORY"`

// watch starts the guard in a new session, which Ctrl-C does not reach.
func (s *Server) watch(directory string) error {
	s.guard = exec.Command("sh", "-c", guard)
	s.guard.Env = append(os.Environ(), "DIRECTORY="+directory)
	s.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	alive, err := s.guard.StdinPipe()
	if err != nil {
		return err
	}
	s.alive = alive
	return s.guard.Start()
}

// Stop ends the API server and removes its data.
func (s *Server) Stop() error {
	return errors.Join(s.Environment.Stop(), s.alive.Close(), s.guard.Wait())
}
