// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"bufio"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/test/poll"
)

// start starts a server for the duration of the test and returns its address.
func start(t *testing.T, options Options) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := New(options)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr().String()
}

// connect opens a connection and sends text.
func connect(t *testing.T, address, text string) (net.Conn, *bufio.Reader) {
	t.Helper()
	connection, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	if _, err := io.WriteString(connection, text); err != nil {
		t.Fatal(err)
	}
	return connection, bufio.NewReader(connection)
}

const request = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"

// answered requires a response with a status code.
func answered(t *testing.T, from *bufio.Reader, code int) {
	t.Helper()
	response, err := http.ReadResponse(from, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil || response.StatusCode != code {
		t.Fatalf("%s, %v; want %d", response.Status, err, code)
	}
}

// closed requires that the server closes a connection.
func closed(t *testing.T, from *bufio.Reader) {
	t.Helper()
	if text, err := io.ReadAll(from); err == nil && len(text) > 0 {
		t.Errorf("unexpected response %q", text)
	}
}

func ok(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") }

// TestHeaderAboveTheLimit verifies that an incomplete header above the limit is rejected with a response that the
// client can read.
func TestHeaderAboveTheLimit(t *testing.T) {
	address := start(t, Options{Handler: http.HandlerFunc(ok), MaxHeaderBytes: 8 << 10})
	_, answer := connect(t, address, "GET / HTTP/1.1\r\nHost: x\r\nX-Long: "+strings.Repeat("x", 16<<10))
	answered(t, answer, http.StatusRequestHeaderFieldsTooLarge)
	_, answer = connect(t, address, "GET / HTTP/1.1\r\nHost: x\r\nX-Long: "+strings.Repeat("x", 4<<10)+"\r\n\r\n")
	answered(t, answer, http.StatusOK)
}

// TestLongestWaitingConnectionIsReplaced verifies that a new connection above the limit replaces the connection that
// has waited longest, but no connection with a request in progress.
func TestLongestWaitingConnectionIsReplaced(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	address := start(t, Options{MaxConnections: 3, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/long" {
			begun <- struct{}{}
			<-end
		}
		ok(w, r)
	})})
	_, long := connect(t, address, "GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
	<-begun
	_, idle := connect(t, address, request)
	answered(t, idle, http.StatusOK)
	_, silent := connect(t, address, "GET / HTTP/1.1\r\nHos")
	_, next := connect(t, address, request)
	answered(t, next, http.StatusOK)
	closed(t, idle)
	_, next = connect(t, address, request)
	answered(t, next, http.StatusOK)
	closed(t, silent)
	close(end)
	answered(t, long, http.StatusOK)
}

// TestBusiestConnectionIsClosed verifies that above the limit of requests in progress, the connection with the most of
// them is closed, and the requests of other connections continue.
func TestBusiestConnectionIsClosed(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	address := start(t, Options{
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 100}, MaxConnections: 2, MaxRequests: 40,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			begun <- struct{}{}
			select {
			case <-end:
				ok(w, r)
			case <-r.Context().Done():
			}
		}),
	})
	ask := func(requests int) (errs chan error) {
		transport := &http.Transport{Protocols: new(http.Protocols), MaxConnsPerHost: 1}
		transport.Protocols.SetUnencryptedHTTP2(true)
		t.Cleanup(transport.CloseIdleConnections)
		client := &http.Client{Transport: transport}
		errs = make(chan error, requests)
		for range requests {
			go func() {
				response, err := client.Post("http://"+address, "", strings.NewReader("not repeated"))
				if err == nil {
					response.Body.Close()
				}
				errs <- err
			}()
			<-begun
		}
		return errs
	}
	few, many := ask(16), ask(32)
	for range 32 {
		if err := <-many; err == nil {
			t.Fatal("a request of the connection with the most requests has an answer")
		}
	}
	close(end)
	for range 16 {
		if err := <-few; err != nil {
			t.Errorf("a request of another connection: %v", err)
		}
	}
}

// TestShutdownWaitsForNoBody verifies that a client that stops sending its body delays the shutdown by no more than
// BodyShutdownTimeout, and gets a response, while a request with a complete body continues.
func TestShutdownWaitsForNoBody(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	begun, failed := make(chan struct{}, 2), make(chan error, 1)
	server := New(Options{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begun <- struct{}{}
		if r.URL.Path == "/complete" {
			if err := <-failed; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the incomplete body ends with %v", err)
			}
			ok(w, r)
			return
		}
		arrived := BodyArrives(r)
		_, err := io.ReadAll(r.Body)
		arrived()
		http.Error(w, "too slow", http.StatusRequestTimeout)
		failed <- err
	})})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	_, complete := connect(t, listener.Addr().String(), "GET /complete HTTP/1.1\r\nHost: x\r\n\r\n")
	_, incomplete := connect(t, listener.Addr().String(), "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
	<-begun
	<-begun
	if err := server.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	answered(t, incomplete, http.StatusRequestTimeout)
	answered(t, complete, http.StatusOK)
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestHeadersTakeMemory verifies that arriving headers reserve memory for their text and an overhead per line, that the
// largest header is revoked if the limit is reached, and that the memory is released after the response.
func TestHeadersTakeMemory(t *testing.T) {
	memory := &Memory{Max: 1 << 20, MaxArriving: 40 << 10}
	held := make(chan int64, 1)
	address := start(t, Options{Memory: memory, MaxHeaderBytes: 64 << 10, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case held <- memory.Held():
		default:
		}
		ok(w, r)
	})})
	_, lines := connect(t, address, "GET / HTTP/1.1\r\nHost: x\r\n"+strings.Repeat("a:\r\n", 100)) // 26 KB with 256 bytes per line
	poll.Until(t, "the lines have come", func() bool { return memory.Held() > 25<<10 })
	_, text := connect(t, address, "GET / HTTP/1.1\r\nHost: x\r\nX-Long: "+strings.Repeat("x", 16<<10))
	closed(t, lines)
	poll.Until(t, "only the text is held", func() bool { return memory.Held() > 16<<10 && memory.Held() < 20<<10 })
	_, small := connect(t, address, request)
	answered(t, small, http.StatusOK)
	if during := <-held; during < 16<<10+int64(len(request)) {
		t.Errorf("%d bytes are held while a request is answered", during)
	}
	connection, answer := connect(t, address, request)
	answered(t, answer, http.StatusOK)
	if _, err := io.WriteString(connection, request); err != nil {
		t.Fatal(err)
	}
	answered(t, answer, http.StatusOK)
	poll.Until(t, "answered requests hold nothing", func() bool { return memory.Held() < 20<<10 })
	_ = text
}

// TestEveryServerHasLimits verifies that no other package creates a server, because it could omit limits. Test programs
// are exempt.
func TestEveryServerHasLimits(t *testing.T) {
	const root = "../.."
	makers := map[string]bool{
		"http.Server": true, "http.ListenAndServe": true, "http.ListenAndServeTLS": true, "http.Serve": true, "http.ServeTLS": true,
		"grpc.NewServer": true, "httptest.NewServer": true, "fcgi.Serve": true, "rpc.NewServer": true,
	}
	checked := 0
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name := entry.Name(); below == "test" || below == filepath.Join("internal", "httpserver") || below != "." && strings.HasPrefix(name, ".") || name == "testdata" {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		checked++
		ast.Inspect(file, func(node ast.Node) bool {
			if selector, ok := node.(*ast.SelectorExpr); ok {
				if from, ok := selector.X.(*ast.Ident); ok && makers[from.Name+"."+selector.Sel.Name] {
					t.Errorf("%s uses %s.%s: create servers with httpserver.New", files.Position(node.Pos()), from.Name, selector.Sel.Name)
				}
			}
			return true
		})
		return nil
	})
	if err != nil || checked < 100 {
		t.Fatalf("%d files are checked: %v", checked, err)
	}
}

// TestNewSetsEveryLimit verifies that every limit of a server is set for all options.
func TestNewSetsEveryLimit(t *testing.T) {
	for name, server := range map[string]*Server{"defaults": New(Options{}), "probes": NewProbes(nil, Options{}.Log)} {
		if server.MaxHeaderBytes <= 0 || server.MaxHeaderBytes > 64<<10 || server.ReadHeaderTimeout <= 0 || server.IdleTimeout <= 0 || server.connections.max <= 0 || name == "probes" && (server.ReadTimeout <= 0 || server.WriteTimeout <= 0) {
			t.Errorf("%s: %d bytes of header in %v, idle for %v, %d connections", name, server.MaxHeaderBytes, server.ReadHeaderTimeout, server.IdleTimeout, server.connections.max)
		}
	}
}

// TestShutdownWaitsForNoConnection verifies that a connection without a request delays the shutdown only a little.
// http.Server waits 5 s for the first request of a connection.
func TestShutdownWaitsForNoConnection(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := New(Options{Handler: http.HandlerFunc(ok)})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	_, silent := connect(t, listener.Addr().String(), "GET / HT")
	poll.Until(t, "the connection is accepted", func() bool {
		server.connections.mu.Lock()
		defer server.connections.mu.Unlock()
		return len(server.connections.all) == 1
	})
	begin := time.Now()
	if err := server.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("the shutdown takes %v", took)
	}
	closed(t, silent)
	if err := <-served; err != nil {
		t.Error(err)
	}
}
