// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
)

// useGrace is the time for which an output is kept after its last use. It far exceeds the time between the end of the
// container that creates the output and the start of the container that leases it.
const useGrace = 10 * time.Minute

// admissionLock is the base name of the file that is locked while a run computes the disk usage of its directory and
// removes outputs. A run that waits for this lock has only the lock of its output, and the owner of the lock waits for
// no other lock. So there is no deadlock.
const admissionLock = ".semmoe-reshuffle.room"

// lockSuffix ends the name of the lock file of an output.
const lockSuffix = ".lock"

// guardName matches the base names of lock, use and probe files next to outputs. They come and go with runs and are not
// part of any model.
var guardName = regexp.MustCompile(`^(\..+(\.probe-\d+|` + regexp.QuoteMeta(lockSuffix) + `|` + regexp.QuoteMeta(usedSuffix) + `)|` + regexp.QuoteMeta(admissionLock) + `)$`)

// reserveSpace reserves the disk space for the output and removes other outputs if necessary. Nothing has been written
// yet.
func (j *job) reserveSpace(ctx context.Context, staging string) error {
	size, gathered, err := j.outputBytes()
	if err != nil {
		return err
	}
	parent := filepath.Dir(j.out)
	admission, err := filelock.Wait(ctx, filepath.Join(parent, admissionLock))
	if err != nil {
		return err
	}
	defer admission.Release()
	var cached []*cachedOutput
	if j.Limit > 0 {
		if cached, err = findCachedOutputs(j.out, j.source.Dir, j.grace); err != nil {
			return err
		}
		defer func() {
			for _, t := range cached {
				t.release()
			}
		}()
	}
	left, err := j.partsOfOthers(staging)
	if err != nil {
		return err
	}
	if left.bytes > 0 {
		cached = append(cached, left)
	}
	needed, err := j.spaceNeeded(staging, size, gathered)
	if err != nil {
		return err
	}
	remove, err := j.chooseRemovals(cached, size, needed)
	if err != nil {
		return err
	}
	for _, t := range cached {
		if !slices.Contains(remove, t) {
			t.release()
		}
	}
	for _, t := range remove {
		logr.FromContextOrDiscard(ctx).Info("Removing an output", "output", t.out, "bytes", t.bytes, "lastUse", t.lastUse)
		if err := t.remove(); err != nil {
			return fmt.Errorf("failed to free disk space for %s: %w", j.out, err)
		}
		t.release()
		j.atStep("removed")
	}
	// Blocks that removed outputs shared with their model do not become free. Check again.
	if free := freeBytes(parent); free < needed {
		return noSpace(parent, needed, free)
	}
	return j.lock.Reserve(size + left.bytes)
}

// partsOfOthers returns the parts of this output that other users have left.
func (j *job) partsOfOthers(staging string) (*cachedOutput, error) {
	all, err := outputBytesOnDisk(j.out)
	if err != nil {
		return nil, err
	}
	own, err := treeBytes(staging)
	return &cachedOutput{out: j.out, bytes: all - own, keepReason: leftByOther}, err
}

// chooseRemovals chooses the outputs to remove so that the limit holds and the volume has enough space. It returns an
// error if removal cannot achieve both.
func (j *job) chooseRemovals(cached []*cachedOutput, size, needed int64) ([]*cachedOutput, error) {
	var over int64
	if j.Limit > 0 {
		over = size - j.Limit
		for _, t := range cached {
			over += t.bytes
		}
	}
	parent := filepath.Dir(j.out)
	free := freeBytes(parent)
	remove, removable := evict(cached, max(over, needed-free))
	switch {
	case over > removable:
		return nil, checkpoint.Invalidf("%s needs %d bytes, the limit for all outputs in %s is %d%s", j.out, size, parent, j.Limit, describe(cached))
	case needed-free > removable:
		return nil, noSpace(parent, needed, free)
	}
	return remove, nil
}

// evict chooses outputs to remove until excess bytes are freed: incomplete outputs first, then the least recently used.
// removable is the total size in bytes of all removable outputs.
func evict(cached []*cachedOutput, excess int64) (remove []*cachedOutput, removable int64) {
	var order []*cachedOutput
	for _, t := range cached {
		if t.keepReason == "" {
			order = append(order, t)
			removable += t.bytes
		}
	}
	slices.SortFunc(order, func(a, b *cachedOutput) int {
		if a.complete != b.complete {
			if b.complete {
				return -1
			}
			return 1
		}
		return cmp.Or(a.lastUse.Compare(b.lastUse), cmp.Compare(a.out, b.out))
	})
	for _, t := range order {
		if excess <= 0 {
			break
		}
		remove = append(remove, t)
		excess -= t.bytes
	}
	return remove, removable
}

// describe lists the outputs that cannot be removed, the largest first.
func describe(cached []*cachedOutput) string {
	var kept []*cachedOutput
	for _, t := range cached {
		if t.keepReason != "" {
			kept = append(kept, t)
		}
	}
	if len(kept) == 0 {
		return ""
	}
	slices.SortFunc(kept, func(a, b *cachedOutput) int { return cmp.Or(cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.out, b.out)) })
	var text strings.Builder
	for _, t := range kept {
		separator := ", "
		if text.Len() == 0 {
			separator = ", and these cannot be removed now: "
		}
		fmt.Fprintf(&text, "%s%s (%d bytes, %s)", separator, filepath.Base(t.out), t.bytes, t.keepReason)
	}
	return text.String()
}

// spaceNeeded returns the number of free bytes that the output still needs on the volume. Data shared with the model
// needs no space. Whether the volume supports sharing is tested only if there is too little free space.
func (j *job) spaceNeeded(staging string, size, gathered int64) (int64, error) {
	already, err := treeBytes(staging)
	if err != nil {
		return 0, err
	}
	needed := max(0, size-already)
	parent := filepath.Dir(j.out)
	if freeBytes(parent) >= needed {
		return needed, nil
	}
	shared, err := j.canShare(parent)
	if shared {
		needed = min(needed, gathered)
	}
	return needed, err
}

// canShare reports whether files in a directory can share the blocks of the model's shards.
func (j *job) canShare(dir string) (bool, error) {
	probe, err := os.CreateTemp(dir, "."+filepath.Base(j.out)+".probe-*")
	if err != nil {
		return false, err
	}
	defer probe.Close()
	if err := os.Remove(probe.Name()); err != nil {
		return false, err
	}
	for _, shard := range j.source.Shards {
		if shared, err := j.copier.clone(probe, shard.Handle(), 0, 0); !shared || err != nil {
			return false, err
		}
		if err := probe.Truncate(0); err != nil {
			return false, err
		}
	}
	return true, nil
}
