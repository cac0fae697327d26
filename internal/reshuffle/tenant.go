package reshuffle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/reshuffle/filelock"
)

// tenant is what runs have made of one output: the output, or the parts that a run has left. What no run has made is none.
type tenant struct {
	// out is the output's path.
	out string
	// bytes is its size; of one that is being made, at least what it was admitted with. Where it can be removed, left is the size of what
	// another user has left beside it, which stays.
	bytes, left int64
	// complete tells that the output is there; identity is that of its work.
	complete bool
	identity string
	lastUse  time.Time
	// stays says why it cannot be removed now; empty where it can: then both of its locks are held.
	stays string
	lock  filelock.Lock
	used  *os.File
}

// release ends the locks, if they are held.
func (t *tenant) release() {
	if t.used != nil {
		t.used.Close()
		t.used = nil
	}
	t.lock.Release()
	t.lock = filelock.Lock{}
}

// findTenants looks at all outputs in a directory but out. Those that may be removed are locked; the model, which may be an
// output itself, stays. The room lock must be held: then a run is either counted by what it has reserved, or will count
// this one.
func findTenants(out, model string, grace time.Duration) (tenants []*tenant, err error) {
	defer func() {
		if err != nil {
			for _, t := range tenants {
				t.release()
			}
			tenants = nil
		}
	}()
	source, err := os.Stat(model)
	if err != nil {
		return nil, err
	}
	names, err := tenantNames(filepath.Dir(out))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		path := filepath.Join(filepath.Dir(out), name)
		if path == out {
			continue
		}
		t, err := newTenant(path, grace)
		if err != nil {
			return tenants, err
		}
		if t == nil {
			continue
		}
		tenants = append(tenants, t)
		if info, err := os.Stat(path); err == nil && os.SameFile(info, source) {
			t.stays = "the model"
			t.release()
		}
		if t.left > 0 {
			tenants = append(tenants, &tenant{out: path, bytes: t.left, stays: othersPart})
		}
	}
	return tenants, nil
}

// tenantNames lists the outputs of which something is in a directory. Each run has a file of use there from before it is
// admitted, so that none is missed while its workplace becomes the output.
func tenantNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		name := entry.Name()
		if match := workplaceName.FindStringSubmatch(name); match != nil && entry.IsDir() {
			names = append(names, match[1])
		} else if used, ok := strings.CutSuffix(name, usedSuffix); ok && len(used) > 1 && used[0] == '.' && entry.Type().IsRegular() {
			names = append(names, used[1:])
		} else if _, ok := completeOutput(filepath.Join(dir, name)); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// completeOutput returns the manifest of a directory that this version of reshuffle has made. A link to one is none: what
// it leads to is another's to count.
func completeOutput(dir string) (*Manifest, bool) {
	if info, err := os.Lstat(dir); err != nil || !info.IsDir() {
		return nil, false
	}
	m, found, err := readManifest(dir)
	return m, err == nil && found && m.Format == Format
}

const (
	// othersOutput is why an output stays that this user may not lock or remove.
	othersOutput = "of another user"
	// othersPart is why a part of one stays that was never finished.
	othersPart = "left by another user"
)

// newTenant looks at one output; it returns nil where nothing is there. It looks again where a run ended meanwhile.
func newTenant(out string, grace time.Duration) (*tenant, error) {
	for {
		t, err := lookAt(out, grace)
		if errors.Is(err, fs.ErrPermission) {
			size, err := presentBytes(out)
			return &tenant{out: out, bytes: size, stays: othersOutput}, err
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return t, err
		}
	}
}

// lookAt looks once; fs.ErrNotExist tells that a run ended meanwhile.
func lookAt(out string, grace time.Duration) (*tenant, error) {
	path := hidden(out, lockSuffix)
	// The lock comes first: a run that has none by now has left all that it will.
	_, noLock := os.Lstat(path)
	if there, err := present(out); err != nil {
		return nil, err
	} else if !there {
		// Where no run has left anything, a file of that name is not ours to make, or to remove.
		if errors.Is(noLock, fs.ErrNotExist) {
			return nil, nil
		}
		if idle, err := filelock.Free(path); err != nil {
			return nil, err
		} else if !idle {
			return busyTenant(out)
		}
		if there, err = present(out); !there || err != nil {
			return nil, err
		}
	}
	held, locked, err := filelock.Try(path)
	switch {
	case err != nil:
		return nil, err
	case locked:
		return idleTenant(out, held, grace)
	}
	return busyTenant(out)
}

// present reports whether an output is there, or what a run has left of it.
func present(out string) (bool, error) {
	parts, err := parts(out)
	return len(parts) > 0, err
}

// parts lists the directories that runs have made of an output: the output itself comes last.
func parts(out string) ([]string, error) {
	paths, err := workplaces(out)
	if _, complete := completeOutput(out); complete {
		paths = append(paths, out)
	}
	return paths, err
}

// busyTenant is one on which a run is at work; fs.ErrNotExist tells that it has ended meanwhile.
func busyTenant(out string) (*tenant, error) {
	// What was reserved comes first: who has reserved nothing by now will not before the room lock is free.
	bytes, err := filelock.Reserved(hidden(out, lockSuffix))
	if err != nil {
		return nil, err
	}
	size, err := presentBytes(out)
	return &tenant{out: out, bytes: max(size, bytes), stays: "being made"}, err
}

// presentBytes is the size of an output and of what runs have left of it.
func presentBytes(out string) (int64, error) {
	paths, err := parts(out)
	if err != nil {
		return 0, err
	}
	var total int64
	for _, part := range paths {
		size, err := treeBytes(part)
		if err != nil {
			return 0, err
		}
		total += size
	}
	return total, nil
}

// idleTenant is one on which no run is at work: the output's lock is held. It returns nil where nothing is there any more.
func idleTenant(out string, held filelock.Lock, grace time.Duration) (_ *tenant, err error) {
	t := &tenant{out: out, lock: held}
	defer func() {
		if err != nil || t.bytes == 0 || t.stays != "" {
			t.release()
		}
	}()
	if t.bytes, err = presentBytes(out); err != nil || t.bytes == 0 {
		return nil, err
	}
	if err := t.checkOwner(); err != nil {
		return nil, err
	}
	m, complete := completeOutput(out)
	if !complete {
		return t, nil
	}
	t.complete, t.identity = true, identity(m.Source, m.PermutationDigest)
	info, err := os.Stat(filepath.Join(out, ManifestFile))
	if err != nil {
		return nil, err
	}
	t.lastUse = info.ModTime()
	if err := t.lockUse(); err != nil {
		return nil, err
	}
	if since := time.Since(t.lastUse); t.stays == "" && since < grace {
		t.stays = fmt.Sprintf("used %d s ago", max(0, int64(since.Seconds())))
	}
	return t, nil
}

// checkOwner finds out what of it this user may remove, before it loses its name.
func (t *tenant) checkOwner() error {
	paths, err := parts(t.out)
	if err != nil {
		return err
	}
	var left int64
	for _, part := range paths {
		if !closedDirectory(part) {
			continue
		}
		size, err := treeBytes(part)
		if err != nil {
			return err
		}
		left += size
		if part == t.out {
			t.stays = othersOutput
		}
	}
	switch {
	case left == t.bytes:
		t.stays = othersOutput
	case t.stays == "":
		t.bytes, t.left = t.bytes-left, left
	}
	return nil
}

// lockUse locks the file of use, if there is one. An output without has never been held.
func (t *tenant) lockUse() (err error) {
	t.used, _, err = filelock.Open(hidden(t.out, usedSuffix))
	if errors.Is(err, fs.ErrNotExist) {
		t.used = nil
		return nil
	}
	if err != nil {
		return err
	}
	info, err := t.used.Stat()
	if err != nil {
		return err
	}
	t.lastUse = info.ModTime()
	if err = filelock.Flock(t.used, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		t.stays = "in use"
		return nil
	}
	return err
}

// remove removes an output whose locks are held. It first loses its name: a reader sees all of it or nothing, and after a
// kill the rest is a workplace in which a run on the same output goes on, or which is removed as any other.
func (t *tenant) remove() error {
	if t.complete {
		workplace := workplaceOf(t.out, t.identity)
		if err := os.RemoveAll(workplace); err != nil {
			return err
		}
		if err := os.Rename(t.out, workplace); err != nil {
			return err
		}
		if err := syncDirectory(filepath.Dir(t.out)); err != nil {
			return err
		}
	}
	left, err := workplaces(t.out)
	if err != nil {
		return err
	}
	for _, part := range left {
		if closedDirectory(part) {
			continue
		}
		if err := os.RemoveAll(part); err != nil {
			return err
		}
	}
	// Another user may have made it, who never came to make the output: then it waits for the next.
	err = os.Remove(hidden(t.out, usedSuffix))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}
