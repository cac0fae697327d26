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

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/reshuffle/filelock"
)

// useGrace is how long an output stays after its last use: the time between the end of the container that made it and the
// start of the one that holds it is far below.
const useGrace = 10 * time.Minute

// roomLock is the base name of the file that is locked while a run counts what its directory holds and makes room. A lock
// on it is waited for only by a run that holds no other lock than its own output's, and its holder waits for no lock: so
// nobody waits for ever.
const roomLock = ".semmoe-reshuffle.room"

// lockSuffix ends the name of the file that a run on an output locks.
const lockSuffix = ".lock"

// guardName matches the base names of the files beside outputs: they come and go with runs, and are part of no model.
var guardName = regexp.MustCompile(`^(\..+(\.probe-\d+|` + regexp.QuoteMeta(lockSuffix) + `|` + regexp.QuoteMeta(usedSuffix) + `)|` + regexp.QuoteMeta(roomLock) + `)$`)

// makeRoom reserves the room that the output needs, and removes what it must for that. Nothing has been written yet.
func (j *job) makeRoom(ctx context.Context, workplace string) error {
	size, gathered, err := j.outputBytes()
	if err != nil {
		return err
	}
	parent := filepath.Dir(j.out)
	room, err := filelock.Wait(ctx, filepath.Join(parent, roomLock))
	if err != nil {
		return err
	}
	defer room.Release()
	var tenants []*tenant
	if j.Limit > 0 {
		if tenants, err = findTenants(j.out, j.source.Dir, j.grace); err != nil {
			return err
		}
		defer func() {
			for _, t := range tenants {
				t.release()
			}
		}()
	}
	left, err := j.othersLeft(workplace)
	if err != nil {
		return err
	}
	if left.bytes > 0 {
		tenants = append(tenants, left)
	}
	needed, err := j.spaceNeeded(workplace, size, gathered)
	if err != nil {
		return err
	}
	remove, err := j.chooseRemovals(tenants, size, needed)
	if err != nil {
		return err
	}
	for _, t := range tenants {
		if !slices.Contains(remove, t) {
			t.release()
		}
	}
	for _, t := range remove {
		logr.FromContextOrDiscard(ctx).Info("Removing", "output", t.out, "bytes", t.bytes, "lastUse", t.lastUse)
		if err := t.remove(); err != nil {
			return fmt.Errorf("make room for %s: %w", j.out, err)
		}
		t.release()
		j.atStep("removed")
	}
	// Blocks that removed outputs shared with their model are not free now.
	if free := freeBytes(parent); free < needed {
		return noSpace(parent, needed, free)
	}
	return j.lock.Reserve(size + left.bytes)
}

// othersLeft is what other users have left of this output.
func (j *job) othersLeft(workplace string) (*tenant, error) {
	all, err := presentBytes(j.out)
	if err != nil {
		return nil, err
	}
	own, err := treeBytes(workplace)
	return &tenant{out: j.out, bytes: all - own, stays: othersPart}, err
}

// chooseRemovals chooses what must go so that the limit holds and the volume has room. It refuses where neither helps.
func (j *job) chooseRemovals(tenants []*tenant, size, needed int64) ([]*tenant, error) {
	var over int64
	if j.Limit > 0 {
		over = size - j.Limit
		for _, t := range tenants {
			over += t.bytes
		}
	}
	parent := filepath.Dir(j.out)
	free := freeBytes(parent)
	remove, removable := evict(tenants, max(over, needed-free))
	switch {
	case over > removable:
		return nil, checkpoint.Invalidf("%s needs %d bytes, the limit for all outputs in %s is %d%s", j.out, size, parent, j.Limit, describe(tenants))
	case needed-free > removable:
		return nil, noSpace(parent, needed, free)
	}
	return remove, nil
}

// evict chooses tenants that may go until excess bytes are gone, those that are of no use first, then the least recently
// used. removable are the bytes of all that may go.
func evict(tenants []*tenant, excess int64) (remove []*tenant, removable int64) {
	var order []*tenant
	for _, t := range tenants {
		if t.stays == "" {
			order = append(order, t)
			removable += t.bytes
		}
	}
	slices.SortFunc(order, func(a, b *tenant) int {
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

// describe lists what cannot be removed, the largest first.
func describe(tenants []*tenant) string {
	var kept []*tenant
	for _, t := range tenants {
		if t.stays != "" {
			kept = append(kept, t)
		}
	}
	if len(kept) == 0 {
		return ""
	}
	slices.SortFunc(kept, func(a, b *tenant) int { return cmp.Or(cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.out, b.out)) })
	var text strings.Builder
	for _, t := range kept {
		separator := ", "
		if text.Len() == 0 {
			separator = ", and these cannot be removed now: "
		}
		fmt.Fprintf(&text, "%s%s (%d bytes, %s)", separator, filepath.Base(t.out), t.bytes, t.stays)
	}
	return text.String()
}

// spaceNeeded is how many bytes the volume must still have room for. What can be shared with the model needs none; whether
// it can is tried only where it matters.
func (j *job) spaceNeeded(workplace string, size, gathered int64) (int64, error) {
	already, err := treeBytes(workplace)
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
