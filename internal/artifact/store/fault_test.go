// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/test/poll"
)

// slowUpload is an upload that the test sends in pieces, over a separate connection.
type slowUpload struct {
	t    *testing.T
	conn *tls.Conn
	data []byte
}

// beginUpload sends the header of a request and the first bytes of its body, and waits until the store has started to
// write.
func beginUpload(t *testing.T, address, token, dir string, data []byte, digest artifact.Digest, first int) *slowUpload {
	t.Helper()
	conn, err := tls.Dial("tcp", address, clientTLS(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	u := &slowUpload{t: t, conn: conn, data: data}
	fmt.Fprintf(conn, "PUT /v1/%s/artifacts/%s HTTP/1.1\r\nHost: store\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n", scopeA, digest, token, len(data))
	u.send(first)
	poll.Until(t, "a temporary file", func() bool { return hasTemporary(t, dir) })
	return u
}

func (u *slowUpload) send(n int) {
	u.t.Helper()
	if _, err := u.conn.Write(u.data[:n]); err != nil {
		u.t.Fatal(err)
	}
	u.data = u.data[n:]
}

// answer reads the status and the body of the response.
func (u *slowUpload) answer() (int, string) {
	u.t.Helper()
	response, err := http.ReadResponse(bufio.NewReader(u.conn), nil)
	if err != nil {
		u.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		u.t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

func hasTemporary(t *testing.T, dir string) bool {
	for _, name := range files(t, dir) {
		if isTemporaryName(name) {
			return true
		}
	}
	return false
}

// An upload of a client that fails is never visible, and nothing remains of it.
func TestCutOffUpload(t *testing.T) {
	dir := t.TempDir()
	store := startDefault(t, dir)
	manager := clientFor(t, store.address, managerToken(t))
	data, digest := randomBytes(t, 2<<20)
	endings := map[string]func(*slowUpload){
		"the connection is closed": func(u *slowUpload) { u.conn.Close() },
		"the connection is reset":  func(u *slowUpload) { reset(t, u.conn) },
	}
	for name, end := range endings {
		t.Run(name, func(t *testing.T) {
			upload := beginUpload(t, store.address, managerToken(t), dir, data, digest, 1<<20)
			if list, err := manager.List(t.Context(), scopeA); err != nil || len(list) > 0 {
				t.Errorf("listed during the upload: %v, %v", list, err)
			}
			if _, err := fetch(t.Context(), manager, scopeA, digest); !errors.Is(err, artifact.ErrNotFound) {
				t.Errorf("fetched during the upload: %v", err)
			}
			end(upload)
			poll.Until(t, "no file is left", func() bool { return len(files(t, dir)) == 0 })
		})
	}
}

// After a store is killed during an upload, the next store cleans up and serves the complete artifacts.
func TestKilledStore(t *testing.T) {
	dir := t.TempDir()
	startDefault(t, t.TempDir()) // publishes its certificate
	token := managerToken(t)
	first := startChild(t, childOptions{Dir: dir})
	whole, wholeDigest := randomBytes(t, 1<<20)
	if _, err := clientFor(t, first.address, token).Put(t.Context(), scopeA, bytes.NewReader(whole)); err != nil {
		t.Fatal(err)
	}
	data, digest := randomBytes(t, 2<<20)
	beginUpload(t, first.address, token, dir, data, digest, 1<<20)
	if err := first.process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := first.process.Wait(); err != nil {
		t.Fatal(err)
	}
	if !hasTemporary(t, dir) {
		t.Fatal("the killed store left no temporary file")
	}
	second := startDefault(t, dir)
	if diff := cmp.Diff([]string{artifactKey(scopeA, wholeDigest)}, files(t, dir)); diff != "" {
		t.Error(diff)
	}
	if got, err := fetch(t.Context(), clientFor(t, second.address, token), scopeA, wholeDigest); err != nil || !bytes.Equal(got, whole) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// A disk of two megabytes that becomes full during an upload.
func TestFullDisk(t *testing.T) {
	mount := t.TempDir()
	startDefault(t, t.TempDir()) // publishes its certificate
	token := managerToken(t)
	store := startChild(t, childOptions{Dir: mount, DiskBytes: 2 << 20})
	inside := filepath.Join("/proc", fmt.Sprint(store.process.Pid), "root", mount)
	c := clientFor(t, store.address, token)

	tooLarge, _ := randomBytes(t, 4<<20)
	if _, err := c.Put(t.Context(), scopeA, bytes.NewReader(tooLarge)); !errors.Is(err, artifact.ErrFull) {
		t.Errorf("artifact larger than the disk: error %v", err)
	}
	slow, slowDigest := randomBytes(t, 1<<20)
	upload := beginUpload(t, store.address, token, inside, slow, slowDigest, 64<<10)
	quick, quickDigest := randomBytes(t, 3<<19)
	if _, err := c.Put(t.Context(), scopeA, bytes.NewReader(quick)); err != nil {
		t.Fatal(err)
	}
	upload.send(len(upload.data))
	if status, text := upload.answer(); status != http.StatusInsufficientStorage || !strings.Contains(text, "enlarge its volume") {
		t.Errorf("upload that fills the disk: %d %s", status, text)
	}
	if diff := cmp.Diff([]string{artifactKey(scopeA, quickDigest)}, files(t, inside)); diff != "" {
		t.Errorf("left on the disk: %s", diff)
	}
	if got, err := fetch(t.Context(), c, scopeA, quickDigest); err != nil || !bytes.Equal(got, quick) {
		t.Errorf("previously stored artifact: %d bytes, %v", len(got), err)
	}
	// Uploads succeed again after space is freed.
	list, err := c.List(t.Context(), scopeA)
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	if err := c.Delete(t.Context(), list[0]); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(t.Context(), scopeA, bytes.NewReader(slow)); err != nil {
		t.Errorf("after space was freed: %v", err)
	}
}

// During a graceful shutdown the store finishes a running upload, and rejects new requests.
func TestGracefulShutdown(t *testing.T) {
	dir := t.TempDir()
	store := startDefault(t, dir)
	data, digest := randomBytes(t, 1<<20)
	upload := beginUpload(t, store.address, managerToken(t), dir, data, digest, 1000)
	store.stop()
	poll.Until(t, "new connections are refused", func() bool {
		conn, err := tls.Dial("tcp", store.address, clientTLS(t))
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	upload.send(len(upload.data))
	if status, text := upload.answer(); status != http.StatusCreated {
		t.Errorf("%d %s", status, text)
	}
	if !fileExists(dir, artifactKey(scopeA, digest)) {
		t.Error("not stored")
	}
}

// reset closes a connection with an error for the other side.
func reset(t *testing.T, conn *tls.Conn) {
	t.Helper()
	tcp := conn.NetConn().(*net.TCPConn)
	if err := errors.Join(tcp.SetLinger(0), tcp.Close()); err != nil {
		t.Fatal(err)
	}
}
