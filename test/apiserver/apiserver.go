// Package apiserver starts etcd and an API server alone, for tests that need no controllers and no nodes. Both end with the process
// that has started them, however that ends: envtest gives them process groups of their own, which neither Ctrl-C nor the end of a
// test that has run out of time would reach.
package apiserver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/test/localcluster"
)

// Server is a running API server. Its Config is an administrator's.
type Server struct {
	*envtest.Environment
	guard *exec.Cmd
	alive io.Closer // the guard acts when this, or this process, is gone
}

// Start starts what is configured, of the programs that localcluster.FindBinaries finds. It is slow.
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
		return nil, errors.Join(fmt.Errorf("start the API server: %w", err), s.Stop())
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
	s.ControlPlane.Etcd = &envtest.Etcd{DataDir: etcd}
	s.ControlPlane.GetAPIServer().CertDir = api
	if _, err := s.Environment.Start(); err != nil {
		return err
	}
	return s.WebhookInstallOptions.Cleanup() // certificates beside the directory, by which nothing is served
}

// guard waits for the end of its input. It kills, until there is none, what was told to keep its files in the directory, and removes
// that. Its own command line does not name it.
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

// watch starts the guard in a session of its own, which Ctrl-C does not reach.
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

// Stop ends the API server, and removes what it has stored.
func (s *Server) Stop() error {
	return errors.Join(s.Environment.Stop(), s.alive.Close(), s.guard.Wait())
}
