// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// rowSample is the number of bytes of each row of a large gathered tensor that are compared, unless full verification
// is requested.
const rowSample = 4096

// verifier verifies that an output is the input with its experts permuted. It reads the names from the output's own
// headers and does not depend on the code that wrote them.
type verifier struct {
	source *checkpoint.Checkpoint
	*mapping
	// full compares every byte. If it is false, a renamed tensor must have the same range of the same shard, and the
	// bytes of gathered tensors are compared (of large tensors, the beginning of each row).
	full bool
}

// verify compares the shards of an output, several concurrently. If full, it returns their sha256 by name. Only
// parallel shards are open at a time: the headers of all shards would need as much memory as those of the source.
func (v *verifier) verify(ctx context.Context, dir string, parallel int) (map[string]string, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	results := make([]string, len(v.source.Shards))
	for i, source := range v.source.Shards {
		group.Go(func() (err error) {
			results[i], err = v.shard(ctx, filepath.Join(dir, source.Name()), len(source.Tensors))
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	sums := map[string]string{}
	for i, source := range v.source.Shards {
		sums[source.Name()] = results[i]
	}
	return sums, nil
}

// shard compares a shard of the output. Each of its tensors must come from the same shard of the source, and the
// numbers of tensors must be equal. So no tensor of the source is missing or duplicated.
func (v *verifier) shard(ctx context.Context, path string, tensors int) (string, error) {
	shard, err := checkpoint.OpenHeader(path)
	if err != nil {
		return "", err
	}
	defer shard.Close()
	if len(shard.Tensors) != tensors {
		return "", fmt.Errorf("%s has %d tensors, the source has %d", path, len(shard.Tensors), tensors)
	}
	h := sha256.New()
	if v.full {
		// Read the data on disk, not the page cache.
		_ = unix.Fadvise(int(shard.Handle().Fd()), 0, 0, unix.FADV_DONTNEED)
		header, err := shard.ReadHeaderText()
		if err != nil {
			return "", err
		}
		h.Write(checkpoint.FrameHeader(header))
	}
	for _, name := range shard.Names() {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		if err := v.tensor(h, shard, name); err != nil {
			return "", fmt.Errorf("%s: tensor %q: %w", shard.Path, name, err)
		}
	}
	if !v.full {
		return "", nil
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (v *verifier) tensor(h hash.Hash, shard *checkpoint.File, name string) error {
	old := v.oldName(name)
	from, ok := v.source.Shard(old)
	if !ok {
		return fmt.Errorf("the source has no tensor %q", old)
	}
	got, want := shard.Tensors[name], from.Tensors[old]
	if from.Name() != shard.Name() || got.Begin != want.Begin || got.End != want.End || got.DType != want.DType || fmt.Sprint(got.Shape) != fmt.Sprint(want.Shape) {
		return fmt.Errorf("the output has %v in %s, the source has %q as %v in %s", got, shard.Name(), old, want, from.Name())
	}
	g, moves := v.gathered[old]
	switch {
	case !moves && !v.full:
		return nil
	case !moves:
		return v.compare(h, shard, from, got.Begin, want.Begin, got.End-got.Begin)
	case !g.axis.Rows():
		return v.packed(h, shard, from, got, want, g)
	}
	row := g.axis.Bits / 8
	length := row
	if !v.full && got.End-got.Begin > smallGather {
		length = min(row, rowSample)
	}
	for j, oldRow := range g.newToOld {
		if err := v.compare(h, shard, from, got.Begin+int64(j)*row, want.Begin+int64(oldRow)*row, length); err != nil {
			return fmt.Errorf("row %d: %w", j, err)
		}
	}
	return nil
}

// packed compares a tensor in which experts are columns or parts of words. If full, it also hashes the tensor.
func (v *verifier) packed(h hash.Hash, a, b *checkpoint.File, got, want checkpoint.Tensor, g gathered) error {
	bytesA, bytesB := make([]byte, got.End-got.Begin), make([]byte, want.End-want.Begin)
	if err := readFull(a.Handle(), bytesA, a.DataStart()+got.Begin); err != nil {
		return err
	}
	if err := readFull(b.Handle(), bytesB, b.DataStart()+want.Begin); err != nil {
		return err
	}
	if !g.axis.SamePermuted(bytesA, bytesB, g.newToOld) {
		return fmt.Errorf("differs from the source")
	}
	if v.full {
		h.Write(bytesA)
	}
	return nil
}

// compare compares ranges of two data sections. If full, it also hashes the first range.
func (v *verifier) compare(h hash.Hash, a, b *checkpoint.File, atA, atB, length int64) error {
	bufferA, bufferB := *buffers.Get().(*[]byte), *buffers.Get().(*[]byte)
	defer buffers.Put(&bufferA)
	defer buffers.Put(&bufferB)
	for length > 0 {
		partA, partB := bufferA[:min(length, bufferBytes)], bufferB[:min(length, bufferBytes)]
		if err := readFull(a.Handle(), partA, a.DataStart()+atA); err != nil {
			return err
		}
		if err := readFull(b.Handle(), partB, b.DataStart()+atB); err != nil {
			return err
		}
		if !bytes.Equal(partA, partB) {
			return fmt.Errorf("differs from the source")
		}
		if v.full {
			h.Write(partA)
		}
		n := int64(len(partA))
		atA, atB, length = atA+n, atB+n, length-n
	}
	return nil
}
