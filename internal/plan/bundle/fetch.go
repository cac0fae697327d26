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
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/regularfile"
	"github.com/semmoe/operator/solver"
)

// maxLayoutFile bounds what is read into memory of a file that a ConfigMap is made of.
const maxLayoutFile = 16 << 20

// Fetch makes dir hold a plan, as plan.Read reads it, and tokenizer.json where the plan has one. Where it holds the plan
// whole already the store is not asked; where it holds anything else, that is replaced. Only one call at a time may be at
// work on a directory.
func Fetch(ctx context.Context, client *artifact.Client, namespace, planDigest, dir string) error {
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
	// Names of their own, so that what a killed process left behind is replaced and never piles up.
	fresh := filepath.Clean(dir) + ".part"
	old := fresh + ".old"
	if err := errors.Join(os.RemoveAll(fresh), os.RemoveAll(old), os.MkdirAll(fresh, 0o755)); err != nil {
		return err
	}
	if err := download(ctx, client, scope, l, text, fresh); err != nil {
		return errors.Join(err, os.RemoveAll(fresh))
	}
	// A process that is killed leaves no half of the old plan in its place, which nobody could tell from something else.
	if err := os.Rename(dir, old); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(fresh, dir); err != nil {
		return err
	}
	return errors.Join(syncFile(filepath.Dir(filepath.Clean(dir))), os.RemoveAll(old))
}

// Holds reports whether a directory holds a plan whole, so that Fetch needs no store.
func Holds(dir, planDigest string) bool { return whole(dir, planDigest) == nil }

// download fills a directory and checks the plan in it.
func download(ctx context.Context, client *artifact.Client, scope artifact.Scope, l list, text []byte, dir string) error {
	for _, name := range slices.Sorted(maps.Keys(l.Files)) {
		content, err := client.Get(ctx, scope, l.Files[name])
		if err == nil {
			err = errors.Join(write(filepath.Join(dir, name), content), content.Close())
		}
		if err != nil {
			return fmt.Errorf("fetch %s of plan %s: %w", name, scope.ID, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, File), text, 0o644); err != nil {
		return err
	}
	if _, _, err := plan.Read(dir); err != nil {
		return fmt.Errorf("plan %s in the store: %w", scope.ID, err)
	}
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() && entry.Name() != File {
			return err
		}
		return syncFile(path)
	})
}

// write flushes a file to the disk.
func write(path string, content io.Reader) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

func syncFile(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// whole tells why a directory does not hold all files of a plan, as they were fetched.
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
func FetchPlan(ctx context.Context, client *artifact.Client, namespace, planDigest string) (*solver.Plan, *plan.Artifact, error) {
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
		return nil, nil, fmt.Errorf("plan %s in the store: %w", scope.ID, err)
	}
	return decoded, a, nil
}

// FetchLayout reads from the store what ConfigMapData needs of a plan: all files but the tables and the tokenizer.
func FetchLayout(ctx context.Context, client *artifact.Client, namespace, planDigest string) (*plan.Artifact, error) {
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
			return nil, fmt.Errorf("fetch %s of plan %s: %w", name, scope.ID, err)
		}
	}
	return a, nil
}
