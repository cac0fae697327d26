// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
)

const (
	// maxLayoutFile bounds a file of a ConfigMap that is read into memory.
	maxLayoutFile = 16 << 20
	// maxBytes bounds all files of a plan that is fetched.
	maxBytes = 2 * plan.MaxFileBytes
)

// errTooLarge is returned for a plan with files above the limits.
var errTooLarge = errors.New("the plan is too large")

// Fetch writes a plan to dir in the format of plan.Read, with tokenizer.json if the plan has one. If dir already
// contains the complete plan, the store is not accessed. Other content of dir is replaced, in one step where the system
// can exchange directories. Only one call at a time may work on a directory.
func Fetch(ctx context.Context, client *access.Client, namespace, planDigest, dir string) error {
	return fetch(ctx, client, namespace, planDigest, dir, func(*plan.Artifact) error { return nil })
}

// fetch is Fetch with a check of the plan before it replaces the content of dir.
func fetch(ctx context.Context, client *access.Client, namespace, planDigest, dir string, check func(*plan.Artifact) error) error {
	scope, err := Scope(namespace, planDigest)
	if err != nil {
		return err
	}
	if whole(dir, planDigest) == nil {
		return nil
	}
	l, text, err := readList(ctx, client, scope, planDigest)
	if err != nil {
		return err
	}
	// The names are fixed, so that the next call replaces the files that a killed process left.
	fresh := filepath.Clean(dir) + ".part"
	old := fresh + ".old"
	if err := errors.Join(os.RemoveAll(fresh), os.RemoveAll(old), os.MkdirAll(fresh, 0o755)); err != nil {
		return err
	}
	a, err := download(ctx, client, scope, l, text, fresh)
	if err == nil {
		err = check(a)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(fresh))
	}
	if err := plan.Exchange(fresh, dir); err != nil {
		return err
	}
	return errors.Join(syncFile(filepath.Dir(filepath.Clean(dir))), os.RemoveAll(fresh)) // fresh is the old plan now
}

// IsComplete reports whether a directory contains a complete plan, so that Fetch needs no store.
func IsComplete(dir, planDigest string) bool { return whole(dir, planDigest) == nil }

// download fills a directory, and verifies and returns the plan in it.
func download(ctx context.Context, client *access.Client, scope artifact.Scope, l list, text []byte, dir string) (*plan.Artifact, error) {
	left := int64(maxBytes)
	for _, name := range slices.Sorted(maps.Keys(l.Files)) {
		content, err := client.Get(ctx, scope, l.Files[name])
		if err == nil {
			var size int64
			size, err = write(filepath.Join(dir, name), content, min(left, plan.MaxBytes(name)))
			left -= size
			err = errors.Join(err, content.Close())
		}
		if err != nil {
			return nil, fmt.Errorf("failed to fetch %s of plan %s: %w", name, scope.ID, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, File), text, 0o644); err != nil {
		return nil, err
	}
	_, a, err := plan.Read(dir)
	if err != nil {
		return nil, fmt.Errorf("invalid plan %s in the store: %w", scope.ID, err)
	}
	return a, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() && entry.Name() != File {
			return err
		}
		return syncFile(path)
	})
}

// write writes a file of at most limit bytes, flushes it to disk, and returns its size.
func write(path string, content io.Reader, limit int64) (int64, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return 0, err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return 0, err
	}
	size, err := io.Copy(file, io.LimitReader(content, limit+1))
	switch {
	case err == nil && size > limit:
		err = fmt.Errorf("%w: more than %d bytes", errTooLarge, limit)
	case err == nil:
		err = file.Sync()
	}
	return size, errors.Join(err, file.Close())
}

func syncFile(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// whole returns the reason for which a directory does not contain all files of a plan as they were fetched, or nil.
func whole(dir, planDigest string) error {
	text, err := regularfile.Read(filepath.Join(dir, File), plan.MaxFileBytes)
	if err != nil {
		return err
	}
	l, err := parseList(text, planDigest)
	if err != nil {
		return err
	}
	for name, want := range l.Files {
		if err := hasDigest(filepath.Join(dir, name), want); err != nil {
			return err
		}
	}
	return nil
}

func hasDigest(path string, want artifact.Digest) error {
	file, err := regularfile.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.Copy(io.Discard, artifact.Verified(file, want))
	return err
}

// FetchPlan reads a plan from the store into memory.
func FetchPlan(ctx context.Context, client *access.Client, namespace, planDigest string) (*solver.Plan, *plan.Artifact, error) {
	scope, err := Scope(namespace, planDigest)
	if err != nil {
		return nil, nil, err
	}
	l, _, err := readList(ctx, client, scope, planDigest)
	if err != nil {
		return nil, nil, err
	}
	decoded, a, err := plan.ReadFiles(func(name string) ([]byte, error) {
		digest, listed := l.Files[name]
		if !listed {
			return nil, fmt.Errorf("%s of plan %s does not list %s", File, scope.ID, name)
		}
		return client.ReadAll(ctx, scope, digest, plan.MaxBytes(name))
	})
	if err != nil {
		return nil, nil, fmt.Errorf("invalid plan %s in the store: %w", scope.ID, err)
	}
	return decoded, a, nil
}

// FetchLayout reads the files for ConfigMapData from the store: all files except the tables and the tokenizer.
func FetchLayout(ctx context.Context, client *access.Client, namespace, planDigest string) (*plan.Artifact, error) {
	scope, err := Scope(namespace, planDigest)
	if err != nil {
		return nil, err
	}
	l, _, err := readList(ctx, client, scope, planDigest)
	if err != nil {
		return nil, err
	}
	a := &plan.Artifact{Files: map[string][]byte{}, Digest: planDigest}
	for name, digest := range l.Files {
		if name == plan.TablesFile || name == TokenizerFile {
			continue
		}
		if a.Files[name], err = client.ReadAll(ctx, scope, digest, maxLayoutFile); err != nil {
			return nil, fmt.Errorf("failed to fetch %s of plan %s: %w", name, scope.ID, err)
		}
	}
	return a, nil
}
