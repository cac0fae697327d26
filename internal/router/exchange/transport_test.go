// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// memory is a body of two parts.
type memory struct {
	io.Reader
	head, rest string
}

func (m *memory) Parts() (string, []byte) { return m.head, []byte(m.rest) }
func (m *memory) Close() error            { return nil }

type refusing struct{}

var errOther = fmt.Errorf("sent by another transport: %w", net.ErrClosed)

func (refusing) RoundTrip(*http.Request) (*http.Response, error) { return nil, errOther }

func newTestTransport(t *testing.T) *Transport {
	t.Helper()
	transport := &Transport{Dial: (&net.Dialer{}).DialContext, IdleTimeout: time.Minute, MaxIdlePerHost: 4, MaxHeaderBytes: 4 << 10, Other: refusing{}}
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

func post(ctx context.Context, t *testing.T, url, head, rest string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions?a=b%20c", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("User-Agent", "")
	r.Header.Set("X-Name", "value")
	r.Body, r.ContentLength = &memory{head: head, rest: rest}, int64(len(head)+len(rest))
	return r
}

// raw serves connections with a function, which gets the number of the connection, from 1.
func raw(t *testing.T, serve func(n int, c net.Conn, r *bufio.Reader)) (url string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for n := 1; ; n++ {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(n, c, bufio.NewReader(c))
			}()
		}
	}()
	return "http://" + listener.Addr().String()
}

// readRequest reads one request with its body.
func readRequest(r *bufio.Reader) (*http.Request, error) {
	request, err := http.ReadRequest(r)
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(io.Discard, request.Body)
	return request, err
}

func read(t *testing.T, response *http.Response) string {
	t.Helper()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	return string(data)
}

// TestServerGetsTheRequest compares what a server of net/http receives and what the client receives from it.
func TestServerGetsTheRequest(t *testing.T) {
	var connections atomic.Int32
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		w.Header().Set("X-Answer", "yes")
		if r.URL.Query().Get("a") == "b c" {
			w.(http.Flusher).Flush() // chunked
		}
		_, agent := r.Header["User-Agent"]
		fmt.Fprintf(w, "%s %s %s %s agent=%v %d %v", r.Method, r.RequestURI, r.Host, r.Header.Get("X-Name"), agent, len(body), err)
	}))
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	server.Start()
	defer server.Close()
	transport := newTestTransport(t)
	host := strings.TrimPrefix(server.URL, "http://")
	for _, size := range []int{0, 1, 1000, inlineBytes - 1, inlineBytes, inlineBytes + 1, 1 << 20} {
		response, err := transport.RoundTrip(post(t.Context(), t, server.URL, "head", strings.Repeat("x", size)))
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("POST /v1/completions?a=b%%20c %s value agent=false %d <nil>", host, size+4)
		if got := read(t, response); got != want || response.Header.Get("X-Answer") != "yes" {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	get, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if response, err := transport.RoundTrip(get); err != nil {
		t.Error(err)
	} else if got, want := read(t, response), "GET / "+host+"  agent=false 0 <nil>"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if n := connections.Load(); n > 2 { // the writer of a large body may end after the response was read
		t.Errorf("%d connections for requests in sequence", n)
	}
}

func TestConnections(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	for name, tc := range map[string]struct {
		// answers are what the server writes to the requests of a connection; the connection ends after them.
		first, later []string
		// bodies are the bodies of the responses to requests in sequence; an error is written as "error".
		bodies []string
		// connections is the number of connections afterwards.
		connections int32
	}{
		"kept":                       {[]string{ok, ok, ok}, nil, []string{"ok", "ok", "ok"}, 1},
		"closed by the server":       {[]string{ok}, []string{ok, ok}, []string{"ok", "ok", "ok"}, 2},
		"closed by its header":       {[]string{"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"}, []string{ok}, []string{"ok", "ok"}, 2},
		"until the end":              {[]string{"HTTP/1.1 200 OK\r\n\r\nall"}, []string{ok}, []string{"all", "ok"}, 2},
		"more than the response":     {[]string{ok + "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmore", ok}, []string{ok}, []string{"ok", "ok"}, 2},
		"interim responses":          {[]string{"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + ok, ok}, nil, []string{"ok", "ok"}, 1},
		"endless interim responses":  {[]string{strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 9) + ok}, []string{ok}, []string{"error", "ok"}, 2},
		"another protocol":           {[]string{"HTTP/1.1 101 Switching Protocols\r\n\r\n"}, []string{ok}, []string{"error", "ok"}, 2},
		"a large header":             {[]string{"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 5<<10) + "\r\n\r\n"}, []string{ok}, []string{"error", "ok"}, 2},
		"no HTTP":                    {[]string{"SSH-2.0-x\r\n"}, []string{ok}, []string{"error", "ok"}, 2},
		"no response":                {[]string{""}, []string{ok}, []string{"error", "ok"}, 2},
		"a response that breaks off": {[]string{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no"}, []string{ok}, []string{"error", "ok"}, 2},
		"a header that breaks off":   {[]string{ok, "HTTP/1.1 200"}, []string{ok}, []string{"ok", "error", "ok"}, 2},
		"no content":                 {[]string{"HTTP/1.1 204 No Content\r\n\r\n", ok}, nil, []string{"", "ok"}, 1},
		"chunks":                     {[]string{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ok}, nil, []string{"ok", "ok"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var connections atomic.Int32
			url := raw(t, func(n int, c net.Conn, r *bufio.Reader) {
				connections.Add(1)
				answers := tc.first
				if n > 1 {
					answers = tc.later
				}
				for _, answer := range answers {
					if _, err := readRequest(r); err != nil {
						return
					}
					io.WriteString(c, answer) //nolint:errcheck // the client notices
				}
			})
			transport := newTestTransport(t)
			for i, want := range tc.bodies {
				got := "error"
				response, err := transport.RoundTrip(post(t.Context(), t, url, "", "body"))
				if err == nil {
					var data []byte
					if data, err = io.ReadAll(response.Body); err == nil {
						got = string(data)
					}
					response.Body.Close()
				}
				if got != want {
					t.Errorf("response %d is %q, want %q; %v", i, got, want, err)
				}
			}
			if n := connections.Load(); n != tc.connections {
				t.Errorf("%d connections, want %d", n, tc.connections)
			}
		})
	}
}

// TestResponseBeforeTheBodyIsRead checks that a response to a large body that the server does not read arrives, and
// that the connection is not used again.
func TestResponseBeforeTheBodyIsRead(t *testing.T) {
	stay := make(chan struct{})
	var connections atomic.Int32
	url := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		connections.Add(1)
		if _, err := http.ReadRequest(r); err == nil {
			io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig") //nolint:errcheck // the client notices
			<-stay
		}
	})
	defer close(stay)
	transport := newTestTransport(t)
	for range 2 {
		response, err := transport.RoundTrip(post(t.Context(), t, url, "", strings.Repeat("x", 32<<20)))
		if err != nil {
			t.Fatal(err)
		}
		if got := read(t, response); got != "big" || response.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("%d %q", response.StatusCode, got)
		}
	}
	if n := connections.Load(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

// TestContextEndsTheConnection cancels requests that wait for a response, and for the rest of a response.
func TestContextEndsTheConnection(t *testing.T) {
	for name, answer := range map[string]string{"before the response": "", "in the response": "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhe"} {
		t.Run(name, func(t *testing.T) {
			arrived, ended := make(chan struct{}), make(chan error, 1)
			url := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
				if _, err := readRequest(r); err != nil {
					return
				}
				io.WriteString(c, answer) //nolint:errcheck // the client notices
				close(arrived)
				_, err := r.ReadByte()
				ended <- err
			})
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-arrived
				cancel()
			}()
			response, err := newTestTransport(t).RoundTrip(post(ctx, t, url, "", "body"))
			if err == nil {
				_, err = io.ReadAll(response.Body)
				response.Body.Close()
			}
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v, want %v", err, context.Canceled)
			}
			if err := <-ended; err == nil {
				t.Error("the server reads more")
			}
		})
	}
}

// TestClosedBodyEndsTheConnection closes a response that is not read to its end.
func TestClosedBodyEndsTheConnection(t *testing.T) {
	ended := make(chan error, 1)
	url := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		if _, err := readRequest(r); err == nil {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhe") //nolint:errcheck // the client notices
			_, err := r.ReadByte()
			ended <- err
		}
	})
	response, err := newTestTransport(t).RoundTrip(post(t.Context(), t, url, "", "body"))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	response.Body.Close()
	if n, err := response.Body.Read(make([]byte, 8)); n != 0 || err == nil {
		t.Errorf("a closed body returns %d bytes, %v", n, err)
	}
	if err := <-ended; err == nil {
		t.Error("the server reads more")
	}
}

func TestIdleConnectionsAreClosed(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	ended := make(chan struct{})
	url := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for {
			if _, err := readRequest(r); err != nil {
				close(ended)
				return
			}
			io.WriteString(c, ok) //nolint:errcheck // the client notices
		}
	})
	transport := newTestTransport(t)
	transport.IdleTimeout = 10 * time.Millisecond
	response, err := transport.RoundTrip(post(t.Context(), t, url, "", "body"))
	if err != nil {
		t.Fatal(err)
	}
	read(t, response)
	<-ended
}

func TestOtherTransport(t *testing.T) {
	transport := newTestTransport(t)
	for name, change := range map[string]func(*http.Request){
		"https":               func(r *http.Request) { r.URL.Scheme = "https" },
		"a body of any kind":  func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader("x")) },
		"an expected request": func(r *http.Request) { r.Header.Set("Expect", "100-continue") },
	} {
		r := post(t.Context(), t, "http://127.0.0.1:1", "", "body")
		change(r)
		if response, err := transport.RoundTrip(r); !errors.Is(err, errOther) {
			t.Errorf("%s: %v, %v", name, response, err)
		}
	}
	var dial *net.OpError
	if _, err := transport.RoundTrip(post(t.Context(), t, "http://127.0.0.1:1", "", "body")); !errors.As(err, &dial) || dial.Op != "dial" {
		t.Errorf("error %v, want one of dial", err)
	}
}

// TestErrorsWithoutText checks that no error repeats text of a response, which may contain a prompt.
func TestErrorsWithoutText(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\n"
	for _, answer := range []string{
		"secret\r\n\r\n", "HTTP/1.1 secret\r\n\r\n", "secret OK 200\r\n\r\n", head + "secret\r\n\r\n", head + "secret\x00: a\r\n\r\n",
		head + "Content-Length: secret\r\n\r\n", head + "Transfer-Encoding: secret\r\n\r\n", head + "Content-Length: 1\r\nContent-Length: 2, secret\r\n\r\n",
		head + "Transfer-Encoding: chunked\r\n\r\nsecret\r\n", head + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nsecret\r\n\r\n",
	} {
		for name, transport := range map[string]http.RoundTripper{"own": newTestTransport(t), "other": &Transport{Other: &http.Transport{DisableKeepAlives: true}}} {
			url := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
				if _, err := readRequest(r); err == nil {
					io.WriteString(c, answer) //nolint:errcheck // the client reports it
				}
			})
			request := post(t.Context(), t, url, "", "a")
			if name == "other" {
				request.Body = io.NopCloser(strings.NewReader("a"))
			}
			response, err := transport.RoundTrip(request)
			if err == nil {
				_, err = io.ReadAll(response.Body)
				response.Body.Close()
			}
			if err == nil || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s transport, %q: error %v", name, answer, err)
			}
		}
	}
}
