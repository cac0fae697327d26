// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"context"
	"crypto/sha1" // the digest of git, which a hub returns for files that are not in LFS
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
)

// partialSuffix ends the name of a file that is not complete. A file without it is complete, verified and on disk.
const partialSuffix = ".partial"

// chunk is the size, in bytes, of the buffer of a transfer.
const chunk = 1 << 20

// newHash returns the hash of a file's content, and the expected digest.
func (f File) newHash() (hash.Hash, string) {
	if f.SHA256 != "" {
		return sha256.New(), f.SHA256
	}
	blob := sha1.New()
	fmt.Fprintf(blob, "blob %d\x00", f.Size)
	return blob, f.GitSHA1
}

// transfer is the transfer of one file.
type transfer struct {
	*download
	of     File
	file   *os.File
	hash   hash.Hash
	want   string
	offset int64
	// reached is the largest offset so far. A server that always sends the same beginning makes no progress.
	reached int64
	buffer  []byte
}

// fetch downloads one file, or the rest of it.
func (d *download) fetch(ctx context.Context, of File) error {
	if info, err := d.root.Lstat(of.Path); err == nil && info.Mode().IsRegular() && info.Size() == of.Size {
		d.progress.bytes.Add(of.Size)
		return nil
	}
	if err := d.root.MkdirAll(path.Dir(of.Path), 0o755); err != nil {
		return err
	}
	file, err := d.root.OpenFile(of.Path+partialSuffix, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer file.Close()
	t := &transfer{download: d, of: of, file: file, buffer: make([]byte, chunk)}
	if err := t.resume(); err != nil {
		return err
	}
	if err := t.complete(ctx); err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		return err
	}
	return d.root.Rename(of.Path+partialSuffix, of.Path)
}

// resume hashes what an earlier run left.
func (t *transfer) resume() error {
	t.hash, t.want = t.of.newHash()
	info, err := t.file.Stat()
	if err != nil {
		return err
	}
	if info.Size() > t.of.Size {
		return t.restart()
	}
	t.offset, err = io.CopyBuffer(t.hash, struct{ io.Reader }{t.file}, t.buffer)
	t.progress.bytes.Add(t.offset)
	t.reached = t.offset
	return err
}

// restart discards the content.
func (t *transfer) restart() error {
	t.progress.bytes.Add(-t.offset)
	t.offset = 0
	t.hash, t.want = t.of.newHash()
	_, err := t.file.Seek(0, io.SeekStart)
	return errors.Join(err, t.file.Truncate(0))
}

// complete requests the rest of the file until it is complete and has its digest. A file with another digest is
// downloaded once more: the part of an earlier run may be damaged.
func (t *transfer) complete(ctx context.Context) error {
	about := t.manifest.Repo + "/" + t.of.Path
	for again := range 2 {
		err := t.client.retry(ctx, func() (bool, error) { return t.request(ctx, about) })
		if err != nil {
			return err
		}
		if got := hex.EncodeToString(t.hash.Sum(nil)); got == t.want {
			return nil
		} else if again > 0 {
			return errors.Join(t.restart(), invalidf("%s is damaged: its digest is %s, but the hub lists %s. The server, or a proxy in between, sends another file", about, got, t.want))
		}
		if err := t.restart(); err != nil {
			return err
		}
	}
	return nil
}

// request requests the rest of the file once.
func (t *transfer) request(ctx context.Context, about string) (progressed bool, err error) {
	if t.offset == t.of.Size {
		return false, nil
	}
	segments := append(escaped(t.manifest.Repo), "resolve", t.manifest.Commit)
	response, err := t.client.get(ctx, t.client.address(append(segments, escaped(t.of.Path)...)...), t.offset, about)
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	ranged := response.StatusCode == http.StatusPartialContent
	switch {
	case response.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return false, errors.Join(t.restart(), &temporaryError{err: fmt.Errorf("failed to read %s: the server has fewer bytes than the file", about)})
	case ranged && !strings.HasPrefix(response.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", t.offset)):
		return false, errors.Join(t.restart(), &temporaryError{err: fmt.Errorf("failed to read %s: the server sends another range than requested", about)})
	case !ranged && t.offset > 0: // the server ignores ranges
		if err := t.restart(); err != nil {
			return false, err
		}
	}
	err = t.copy(response.Body, about)
	progressed = t.offset > t.reached
	t.reached = max(t.reached, t.offset)
	return progressed, err
}

// copy appends a response body to the file.
func (t *transfer) copy(body io.Reader, about string) error {
	for {
		n, err := body.Read(t.buffer)
		if int64(n) > t.of.Size-t.offset {
			return invalidf("failed to read %s: the server sends more than the %d bytes that the hub lists", about, t.of.Size)
		}
		if _, err := t.file.Write(t.buffer[:n]); err != nil {
			return fmt.Errorf("failed to write %s: %w", t.of.Path, err)
		}
		t.hash.Write(t.buffer[:n])
		t.offset += int64(n)
		t.progress.receive(n)
		switch {
		case err == io.EOF && t.offset == t.of.Size:
			return nil
		case err == io.EOF:
			return &temporaryError{err: fmt.Errorf("failed to read %s: the server ends after %d of %d bytes", about, t.offset, t.of.Size)}
		case err != nil:
			return t.client.transportError(about, err, nil)
		}
	}
}
