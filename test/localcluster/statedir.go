// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/semmoe/operator/test/localcluster/internal/node"
)

// lockName is the file that marks a directory as a state directory. Start deletes the content of a directory with this
// file, and rejects any other directory that is not empty: a mistyped path must not delete a user's files.
const lockName = ".localcluster"

// stateDir is a directory that one cluster owns while the lock file is open in any process.
type stateDir struct {
	path      string
	temporary bool
	lock      *os.File
}

// openStateDir locks and empties the directory path, which is created if it does not exist. For "" it creates a
// temporary directory.
func openStateDir(path string) (*stateDir, error) {
	d := &stateDir{path: path, temporary: path == ""}
	var err error
	if d.temporary {
		d.path, err = os.MkdirTemp("", "localcluster-")
	} else if d.path, err = filepath.Abs(path); err == nil {
		err = os.MkdirAll(d.path, 0o755)
	}
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if err := d.take(); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *stateDir) take() error {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	lock := filepath.Join(d.path, lockName)
	if _, err := os.Stat(lock); err != nil && len(entries) > 0 {
		return fmt.Errorf("state directory %s is not empty and was not created by a local cluster: use another directory or empty this one", d.path)
	}
	if d.lock, err = os.OpenFile(lock, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	// The supervisor inherits the same open file, so after a crash of its parent the lock is released only when the
	// last process has ended.
	if err := syscall.Flock(int(d.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("state directory %s is in use by another local cluster: stop that cluster or use another directory", d.path)
	}
	for _, e := range entries {
		if e.Name() == lockName {
			continue
		}
		if err := node.RemoveTree(filepath.Join(d.path, e.Name())); err != nil {
			return fmt.Errorf("state directory: %w", err)
		}
	}
	return os.MkdirAll(filepath.Join(d.path, "logs"), 0o755)
}

// close releases the directory and removes it if it is temporary.
func (d *stateDir) close() error {
	var err error
	if d.temporary {
		err = node.RemoveTree(d.path)
	}
	if d.lock != nil {
		err = errors.Join(err, d.lock.Close())
	}
	return err
}
