// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"bufio"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/semmoe/operator/test/localcluster/internal/controlplane"
	"github.com/semmoe/operator/test/tier"
)

// binariesVariable is the environment variable with the directory of another release's programs.
const binariesVariable = "KUBERNETES_BINARIES"

// FindBinaries returns the directory of the Kubernetes programs. The environment variable KUBERNETES_BINARIES names the
// directory; if it is unset, FindBinaries returns bin/kubernetes-<version> for the pinned release, in the repository
// that contains the working directory. If a program is missing, the error is a tier.NotBuiltError.
func FindBinaries() (string, error) {
	if dir := os.Getenv(binariesVariable); dir != "" {
		return dir, checkBinaries(dir)
	}
	root, err := RepositoryRoot()
	if err != nil {
		return "", err
	}
	version, err := pinnedVersion(filepath.Join(root, "test", "kubernetes", "go.mod"))
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, "bin", "kubernetes-"+version)
	return dir, checkBinaries(dir)
}

// RepositoryRoot returns the root of the repository that contains the working directory.
func RepositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for start := dir; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "test", "kubernetes", "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no directory above %s holds test/kubernetes/go.mod: run this inside the repository", start)
		}
	}
}

// pinnedVersion reads the version of k8s.io/kubernetes that the module file requires.
func pinnedVersion(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(strings.TrimPrefix(strings.TrimSpace(lines.Text()), "require "))
		if len(fields) >= 2 && fields[0] == "k8s.io/kubernetes" {
			return fields[1], nil
		}
	}
	return "", errors.Join(fmt.Errorf("%s requires no k8s.io/kubernetes", path), lines.Err())
}

func checkBinaries(dir string) error {
	for _, name := range controlplane.Programs() {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode()&0o111 == 0 {
			return &tier.NotBuiltError{Path: filepath.Join(dir, name), Command: "make controlplane"}
		}
	}
	return nil
}

// checkImages verifies that each image is a statically linked Linux program at an absolute path.
func checkImages(images map[string]string) error {
	for reference, path := range images {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("image %s: %s is not an absolute path", reference, path)
		}
		f, err := elf.Open(path)
		if err != nil {
			return fmt.Errorf("image %s: %s is not a Linux program: %w", reference, path, err)
		}
		defer f.Close()
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP {
				return fmt.Errorf("image %s: %s is dynamically linked: build it with CGO_ENABLED=0", reference, path)
			}
		}
	}
	return nil
}
