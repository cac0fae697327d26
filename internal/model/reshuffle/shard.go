// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// shardPlan describes how a shard is copied.
type shardPlan struct {
	source *checkpoint.File
	// header is the text of the new header. It is shift bytes longer than the old header. sameHeader reports that it is
	// the old header.
	header     []byte
	sameHeader bool
	shift      int64
	// gathers lists the tensors in which expert values move, ordered by offset.
	gathers []gather
}

// gather is a tensor in which expert values move.
type gather struct {
	gathered
	tensor     string
	begin, end int64 // relative to the data section
}

func (g gather) bytes() int64 { return g.end - g.begin }

// rowBytes is the size of an expert's row. It applies only to tensors with rows.
func (g gather) rowBytes() int64 { return g.axis.Bits / 8 }

// hashed reports whether the manifest contains the tensor's hash.
func (g gather) hashed() bool { return g.bytes() <= smallGather }

// smallGather is the maximum size of a gathered tensor that is hashed and compared by default. Gates are far smaller,
// the fused tensors of real models larger.
const smallGather = 16 << 20

// maxShortRow is the maximum size of a row that is copied through memory, which is cheaper than one system call per
// row. Rows of gates have at most 28 KiB in known models.
const maxShortRow = 64 << 10

func planShard(source *checkpoint.File, m *mapping) (*shardPlan, error) {
	p := &shardPlan{source: source, sameHeader: true}
	for old, tensor := range source.Tensors {
		p.sameHeader = p.sameHeader && m.newName(old) == old
		if g, found := m.gathered[old]; found {
			p.gathers = append(p.gathers, gather{g, old, tensor.Begin, tensor.End})
		}
	}
	slices.SortFunc(p.gathers, func(a, b gather) int { return cmp.Compare(a.begin, b.begin) })
	if p.sameHeader {
		var err error
		p.header, err = source.ReadHeaderText()
		return p, err
	}
	header, err := checkpoint.EncodeRenamed(&source.Header, source.HeaderBytes(), m.newName)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source.Path, err)
	}
	if grown := len(header) - source.HeaderBytes(); grown > 0 {
		// Data that is shifted by whole blocks can still share the blocks of the source.
		p.shift = int64((grown + blockBytes - 1) / blockBytes * blockBytes)
		header = append(header, bytes.Repeat([]byte{' '}, int(p.shift)-grown)...)
	}
	p.header = header
	return p, nil
}

func (p *shardPlan) dataStart() int64 { return 8 + int64(len(p.header)) }
func (p *shardPlan) size() int64      { return p.source.Size + p.shift }

func (p *shardPlan) gathered() int64 {
	var total int64
	for _, g := range p.gathers {
		total += g.bytes()
	}
	return total
}

// written reports whether a file is the finished copy. Files get their final name only after they are on disk.
func (p *shardPlan) written(path string) (bool, error) {
	file, err := checkpoint.OpenFile(path)
	if checkpoint.IsInvalid(err) {
		return false, nil // missing, or not written by this package
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	return file.Size == p.size() && bytes.Equal(file.HeaderText, p.header), nil
}

// write writes the copy under its final name.
func (p *shardPlan) write(ctx context.Context, c *copier, path string) error {
	return writeAtomically(path, func(file *os.File) error {
		if err := p.fill(ctx, c, file); err != nil {
			return err
		}
		return p.sourceUnchanged()
	})
}

func (p *shardPlan) fill(ctx context.Context, c *copier, file *os.File) error {
	source := p.source.Handle()
	cloned, err := c.clone(file, source, p.source.DataStart(), p.shift)
	if err != nil {
		return err
	}
	if cloned {
		c.done.Add(p.source.DataBytes() - p.gathered())
	} else if err := p.copyData(ctx, c, file); err != nil {
		return err
	}
	for _, g := range p.gathers {
		if err := p.gather(ctx, c, file, g); err != nil {
			return err
		}
	}
	if p.sameHeader && cloned {
		return nil
	}
	_, err = file.WriteAt(checkpoint.FrameHeader(p.header), 0)
	return err
}

// copyData copies the data section except the gathered tensors.
func (p *shardPlan) copyData(ctx context.Context, c *copier, file *os.File) error {
	if err := checkSpace(file, c.total-c.done.Load()); err != nil {
		return err
	}
	at := int64(0)
	to := func(end int64) error {
		s := span{p.dataStart() + at, p.source.DataStart() + at, end - at}
		return c.copy(ctx, file, p.source.Handle(), s)
	}
	for _, g := range p.gathers {
		if err := to(g.begin); err != nil {
			return err
		}
		at = g.begin + g.bytes()
	}
	return to(p.source.DataBytes())
}

// checkSpace returns an error if the volume has not enough free space, before any time is spent on copying.
func checkSpace(file *os.File, size int64) error {
	dir := filepath.Dir(file.Name())
	if free := freeBytes(dir); free < size {
		return noSpace(dir, size, free)
	}
	return nil
}

// freeBytes returns the free space of a directory's file system in bytes, or math.MaxInt64 if the file system does not
// report it.
func freeBytes(dir string) int64 {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil || s.Bsize <= 0 || s.Bavail > uint64(math.MaxInt64/s.Bsize) {
		return math.MaxInt64
	}
	return int64(s.Bavail) * s.Bsize
}

func noSpace(dir string, size, free int64) error {
	return fmt.Errorf("failed to write to %s: the output needs %d more bytes, the volume has %d bytes free: %w", dir, size, free, unix.ENOSPC)
}

// gather copies the expert values of a tensor: large rows inside the kernel, the many short rows of a gate and packed
// values through a buffer.
func (p *shardPlan) gather(ctx context.Context, c *copier, file *os.File, g gather) error {
	to, from := p.dataStart()+g.begin, p.source.DataStart()+g.begin
	switch row := g.rowBytes(); {
	case !g.axis.Rows():
		c.done.Add(g.bytes())
		return g.gatherPacked(file, p.source.Handle(), to, from)
	case row <= maxShortRow:
		c.done.Add(g.bytes())
		return g.gatherShort(file, p.source.Handle(), to, from)
	}
	for j, old := range g.newToOld {
		if err := c.copy(ctx, file, p.source.Handle(), span{to + int64(j)*g.rowBytes(), from + int64(old)*g.rowBytes(), g.rowBytes()}); err != nil {
			return fmt.Errorf("tensor %q: %w", g.tensor, err)
		}
	}
	return nil
}

// gatherPacked permutes a tensor in which experts are columns or parts of words. Only gates have such tensors, and
// gates are small.
func (g gather) gatherPacked(file, source *os.File, to, from int64) error {
	old, permuted := make([]byte, g.bytes()), make([]byte, g.bytes())
	if err := readFull(source, old, from); err != nil {
		return fmt.Errorf("tensor %q: %w", g.tensor, err)
	}
	g.axis.Permute(permuted, old, g.newToOld)
	_, err := file.WriteAt(permuted, to)
	return err
}

// gatherShort copies short rows. It fills the buffer before it writes.
func (g gather) gatherShort(file, source *os.File, to, from int64) error {
	buffer := *buffers.Get().(*[]byte)
	defer buffers.Put(&buffer)
	fill := buffer[:0]
	for j, old := range g.newToOld {
		row := fill[len(fill) : len(fill)+int(g.rowBytes())]
		if err := readFull(source, row, from+int64(old)*g.rowBytes()); err != nil {
			return fmt.Errorf("tensor %q: %w", g.tensor, err)
		}
		fill = fill[:len(fill)+len(row)]
		if j < len(g.newToOld)-1 && len(fill)+len(row) <= cap(fill) {
			continue
		}
		if _, err := file.WriteAt(fill, to); err != nil {
			return fmt.Errorf("tensor %q: %w", g.tensor, err)
		}
		to += int64(len(fill))
		fill = buffer[:0]
	}
	return nil
}

// sourceUnchanged returns an error if the size of the source shard changed during the copy.
func (p *shardPlan) sourceUnchanged() error {
	info, err := p.source.Handle().Stat()
	if err != nil {
		return err
	}
	if info.Size() != p.source.Size {
		return checkpoint.Invalidf("%s changed while it was copied", p.source.Path)
	}
	return nil
}

// hashGathers hashes the gathered tensors of a finished copy that are small enough to read back immediately.
func (p *shardPlan) hashGathers(path string) (map[string]string, error) {
	file, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	sums := map[string]string{}
	for _, g := range p.gathers {
		if !g.hashed() {
			continue
		}
		h := sha256.New()
		if err := hashRange(h, file, p.dataStart()+g.begin, g.bytes()); err != nil {
			return nil, err
		}
		sums[g.tensor] = hex.EncodeToString(h.Sum(nil))
	}
	return sums, nil
}

func hashRange(h hash.Hash, file *os.File, at, length int64) error {
	buffer := *buffers.Get().(*[]byte)
	defer buffers.Put(&buffer)
	n, err := io.CopyBuffer(struct{ io.Writer }{h}, io.NewSectionReader(file, at, length), buffer)
	if err == nil && n < length {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("%s: %w", file.Name(), err)
	}
	return nil
}

// temporarySuffix marks files that are being written.
const temporarySuffix = ".writing"

// fileMode and directoryMode let all users read the output, regardless of the umask. An engine often runs as a
// different user than the process that prepares its pod.
const (
	fileMode      = 0o644
	directoryMode = 0o755
)

// writeAtomically gives a file its final name only after it is complete and on disk. A temporary file of a killed run
// is removed instead of overwritten: it may belong to another user, for example to root, who updated the output for its
// owner.
func writeAtomically(path string, fill func(*os.File) error) error {
	temporary := path + temporarySuffix
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(temporary, os.O_RDWR|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return err
	}
	if err := errors.Join(file.Chmod(fileMode), fill(file)); err != nil {
		file.Close()
		return err
	}
	if err := file.Sync(); err != nil {
		file.Close()
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

func syncDirectory(dir string) error {
	file, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer file.Close()
	return file.Sync()
}

// copyFile copies a file of the model that is not a shard.
func copyFile(ctx context.Context, c *copier, model, name, to string) error {
	source, err := openInside(model, name)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), directoryMode); err != nil {
		return err
	}
	return writeAtomically(to, func(file *os.File) error {
		if cloned, err := c.clone(file, source, 0, 0); cloned || err != nil {
			return err
		}
		return c.copy(ctx, file, source, span{0, 0, info.Size()})
	})
}
