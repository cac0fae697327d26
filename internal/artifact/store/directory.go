// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"gocloud.dev/blob"
	"gocloud.dev/blob/fileblob"
	_ "gocloud.dev/blob/s3blob" // opens s3:// URLs
	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/artifact"
)

const lockName = ".lock"

// directory adds durability and an exclusive lock to a fileblob bucket.
type directory struct {
	handle *os.File
	lock   *os.File
}

// openDirectory takes the lock and removes the temporary files of a killed store. No other store is writing while the
// lock is held.
func openDirectory(address string) (*blob.Bucket, *directory, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, nil, err
	}
	if u.Host != "" || !filepath.IsAbs(u.Path) || u.RawQuery != "" {
		return nil, nil, errors.New("must be file:// and an absolute path, without parameters")
	}
	dir := &directory{}
	if dir.handle, err = os.Open(u.Path); err != nil {
		return nil, nil, err
	}
	if dir.lock, err = lock(filepath.Join(u.Path, lockName)); err != nil {
		dir.handle.Close()
		return nil, nil, err
	}
	if err := removeTemporary(u.Path); err != nil {
		return nil, nil, errors.Join(err, dir.close())
	}
	bucket, err := fileblob.OpenBucket(u.Path, &fileblob.Options{
		NoTempDir: true, // a rename must stay inside the file system
		Metadata:  fileblob.MetadataDontWrite,
	})
	if err != nil {
		return nil, nil, errors.Join(err, dir.close())
	}
	return bucket, dir, nil
}

func lock(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.New("another store uses this directory")
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return file, nil
}

func removeTemporary(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !isTemporaryName(entry.Name()) {
			continue
		}
		if err := os.Remove(filepath.Join(path, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// list returns the artifacts with a key prefix. The list method of the bucket cannot be used, because it fails if a
// file disappears in the meantime, as temporary files of uploads do.
func (d *directory) list(prefix string) ([]artifact.Artifact, error) {
	entries, err := os.ReadDir(d.handle.Name())
	if err != nil {
		return nil, err
	}
	artifacts := []artifact.Artifact{} // encoded as an empty JSON list, not as null
	for _, entry := range entries {
		scope, digest, ok := parseArtifactKey(entry.Name())
		if !ok || !strings.HasPrefix(entry.Name(), prefix) {
			continue
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		artifacts = append(artifacts, artifact.Artifact{Scope: scope, Digest: digest, Size: info.Size(), Modified: info.ModTime()})
	}
	return artifacts, nil
}

// sync makes renames durable. Without it, a power failure could undo a rename.
func (d *directory) sync() error { return d.handle.Sync() }

// fits returns an error if an upload does not fit on the file system, before its first byte is read.
func (d *directory) fits(size int64) error {
	free, _, err := d.space()
	if err == nil && size > free {
		return syscall.ENOSPC
	}
	return err
}

// space returns the number of available bytes and the capacity of the file system.
func (d *directory) space() (free, capacity int64, err error) {
	var stat unix.Statfs_t
	if err := unix.Fstatfs(int(d.handle.Fd()), &stat); err != nil {
		return 0, 0, err
	}
	return int64(stat.Bavail) * stat.Bsize, int64(stat.Blocks) * stat.Bsize, nil
}

func (d *directory) close() error { return errors.Join(d.lock.Close(), d.handle.Close()) }
