// SPDX-License-Identifier: Apache-2.0

// Package programs runs the programs in bin/, and the pinned versions of Helm and kubectl, as subprocesses.
package programs

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/tier"
)

// Kubectl returns the path of kubectl of the pinned release.
var Kubectl = sync.OnceValues(func() (string, error) {
	binaries, err := localcluster.FindBinaries()
	return filepath.Join(binaries, "kubectl"), err
})

// Built returns the path of a program of this repository in bin/, such as semmoe.
func Built(name string) (string, error) {
	root, err := localcluster.RepositoryRoot()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, "bin", name)
	if _, err := os.Stat(path); err != nil {
		return "", &tier.NotBuiltError{Path: path, Command: "make build"}
	}
	return path, nil
}

// Helm returns the path of Helm. It builds Helm if the binary does not exist.
var Helm = sync.OnceValues(func() (string, error) {
	binaries, err := localcluster.FindBinaries()
	if err != nil {
		return "", err
	}
	repository := filepath.Join(binaries, "..", "..")
	path, err := Run(filepath.Join(repository, "internal", "tools", "helm", "build.sh"), nil, "")
	return strings.TrimSpace(path), err
})

// Run runs a program and returns its standard output. An error contains the standard error. env is added to the
// environment.
func Run(path string, env []string, stdin string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	command := exec.Command(path, args...)
	command.Env = append(os.Environ(), env...)
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := command.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(path), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
