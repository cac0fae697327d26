// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Transport is an http.RoundTripper for engines. Its fields must not change after the first request. It is safe for
// concurrent use.
type Transport struct {
	// Dial opens a connection.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// IdleTimeout is the maximum time that a connection is kept without a request, MaxIdlePerHost the maximum number of
	// these connections to one address.
	IdleTimeout    time.Duration
	MaxIdlePerHost int
	// MaxHeaderBytes is the maximum size of a response header, with the interim responses before it.
	MaxHeaderBytes int64
	// Other sends the requests that this transport does not send.
	Other http.RoundTripper

	mu sync.Mutex
	// idle contains the connections without a request by address, the latest used last. sweeping is true while a timer
	// is set that closes old ones.
	idle     map[string][]*conn
	sweeping bool
}

// Body is a request body in memory. It consists of a short head and a rest that is not copied.
type Body interface {
	io.ReadCloser
	Parts() (head string, rest []byte)
}

const (
	// inlineBytes is the maximum size of a body that is written before the response is read. Such a body fits the
	// buffers of the connection, so that an engine that responds before it reads the body does not block the request.
	inlineBytes = 64 << 10
	// maxInterim is the maximum number of interim responses (1xx) to a request.
	maxInterim = 8
	// readBytes is the size of the read buffer of a connection.
	readBytes = 4 << 10
	// keptHead is the maximum size of a buffer for request headers that is reused.
	keptHead = 16 << 10
)

var (
	errHeaderTooBig = errors.New("the header of the response is too large")
	errInterim      = errors.New("too many interim responses")
	errUpgrade      = errors.New("the engine has changed the protocol")
	errMalformed    = errors.New("the response is malformed")
)

// RoundTrip sends a request and returns its response, whose body the caller must close.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	body, inMemory := r.Body.(Body)
	if r.URL.Scheme != "http" || len(r.TransferEncoding) > 0 || r.Header.Get("Expect") != "" || !inMemory && r.Body != nil && r.Body != http.NoBody {
		return t.sendByOther(r)
	}
	if inMemory {
		defer body.Close() //nolint:errcheck // it is in memory
	}
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if c := t.take(r.URL.Host); c != nil {
		response, err := c.exchange(r, body)
		// The engine may have closed an unused connection at the moment when the request was sent.
		if err == nil || c.received || r.Context().Err() != nil {
			return response, err
		}
	}
	raw, err := t.Dial(r.Context(), "tcp", r.URL.Host)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, transport: t, host: r.URL.Host}
	c.reader = bufio.NewReaderSize(c, readBytes)
	return c.exchange(r, body)
}

// sendByOther sends a request with the other transport.
func (t *Transport) sendByOther(r *http.Request) (*http.Response, error) {
	response, err := t.Other.RoundTrip(r)
	if err != nil {
		return nil, withoutText(err)
	}
	if response.Body != http.NoBody {
		response.Body = &textlessBody{response.Body}
	}
	return response, nil
}

// textlessBody returns errors without text of the response.
type textlessBody struct{ io.ReadCloser }

func (b *textlessBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	return n, withoutText(err)
}

// withoutText replaces errors that quote the response, which may repeat a prompt and is not to be logged. Errors of the
// network contain no text of it.
func withoutText(err error) error {
	if err == nil || err == io.EOF { // a reader returns io.EOF as such
		return err
	}
	for _, known := range []error{io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe, context.Canceled, context.DeadlineExceeded, os.ErrClosed, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE, errHeaderTooBig, errInterim, errUpgrade} {
		if errors.Is(err, known) {
			return err
		}
	}
	if network := (net.Error)(nil); errors.As(err, &network) {
		return err
	}
	return errMalformed
}

// conn is a connection to an engine. It belongs to one request at a time.
type conn struct {
	net.Conn
	transport *Transport
	host      string
	reader    *bufio.Reader
	// left is the number of bytes that may still be read of a header. received is true once a byte of the response was
	// read.
	left     int64
	received bool
	// written receives the result of writing a large body; nil if the request was written before.
	written chan error
	// stop ends the watch of the context. It returns false if the context has ended.
	stop func() bool
	// since is the time at which the last request ended.
	since time.Time
}

// Read reads from the connection, within the limit.
func (c *conn) Read(p []byte) (int, error) {
	if c.left <= 0 {
		return 0, errHeaderTooBig
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	c.received = c.received || n > 0
	return n, err
}

// exchange sends a request and reads the header of its response. If it fails, the connection is closed.
func (c *conn) exchange(r *http.Request, body Body) (*http.Response, error) {
	ctx := r.Context()
	c.left, c.received, c.written = c.transport.MaxHeaderBytes, false, nil
	c.stop = context.AfterFunc(ctx, func() { c.Close() }) //nolint:errcheck // the request fails by its context
	writeErr := c.write(r, body)
	response, err := c.readResponse(r)
	if err == nil {
		c.left = 1<<63 - 1
		c.attach(response, writeErr == nil && !response.Close)
		return response, nil
	}
	c.stop()
	c.Close() //nolint:errcheck // it has failed
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case writeErr != nil:
		return nil, fmt.Errorf("failed to send the request to %s: %w", c.host, writeErr)
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	}
	return nil, fmt.Errorf("failed to read the response of %s: %w", c.host, withoutText(err))
}

var heads = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// notCopied are the headers that are not written as the request has them. notCopiedWithAgent is for a request whose
// User-Agent is empty: net/http then sends none.
var (
	notCopied          = map[string]bool{"Host": true, "Content-Length": true, "Transfer-Encoding": true, "Trailer": true}
	notCopiedWithAgent = map[string]bool{"Host": true, "Content-Length": true, "Transfer-Encoding": true, "Trailer": true, "User-Agent": true}
)

// write writes a request. A large body is written while the response is awaited.
func (c *conn) write(r *http.Request, body Body) error {
	head := heads.Get().(*bytes.Buffer)
	defer func() {
		if head.Cap() <= keptHead {
			heads.Put(head)
		}
	}()
	head.Reset()
	head.WriteString(r.Method)
	head.WriteByte(' ')
	head.WriteString(r.URL.RequestURI())
	head.WriteString(" HTTP/1.1\r\nHost: ")
	host := r.Host
	if host == "" {
		host = r.URL.Host
	}
	head.WriteString(host)
	head.WriteString("\r\n")
	var first string
	var rest []byte
	if body != nil {
		first, rest = body.Parts()
	}
	if length := len(first) + len(rest); length > 0 || r.Method == http.MethodPost || r.Method == http.MethodPut || r.Method == http.MethodPatch {
		head.WriteString("Content-Length: ")
		head.Write(strconv.AppendInt(head.AvailableBuffer(), int64(length), 10))
		head.WriteString("\r\n")
	}
	excluded := notCopied
	if r.Header.Get("User-Agent") == "" {
		excluded = notCopiedWithAgent
	}
	if err := r.Header.WriteSubset(head, excluded); err != nil {
		return err
	}
	head.WriteString("\r\n")
	head.WriteString(first)
	if len(rest) <= inlineBytes {
		return c.send(head.Bytes(), rest)
	}
	if _, err := c.Conn.Write(head.Bytes()); err != nil {
		return err
	}
	c.written = make(chan error, 1)
	go func(written chan<- error) {
		_, err := c.Conn.Write(rest)
		written <- err
	}(c.written)
	return nil
}

// send writes two buffers with one system call.
func (c *conn) send(head, rest []byte) error {
	if len(rest) == 0 {
		_, err := c.Conn.Write(head)
		return err
	}
	buffers := net.Buffers{head, rest}
	_, err := buffers.WriteTo(c.Conn)
	return err
}

// readResponse reads the header of the final response.
func (c *conn) readResponse(r *http.Request) (*http.Response, error) {
	for range maxInterim {
		response, err := http.ReadResponse(c.reader, r)
		switch {
		case err != nil:
			return nil, err
		case response.StatusCode == http.StatusSwitchingProtocols:
			return nil, errUpgrade
		case response.StatusCode >= http.StatusOK:
			return response, nil
		}
	}
	return nil, errInterim
}

// attach makes the end of the response body return the connection, if it may be reused.
func (c *conn) attach(response *http.Response, reusable bool) {
	if response.Body == http.NoBody {
		c.finish(reusable)
		return
	}
	response.Body = &responseBody{from: response.Body, conn: c, reusable: reusable}
}

// finish ends an exchange. It keeps the connection for the next request if the whole request was written, nothing
// follows the response and the context has not ended.
func (c *conn) finish(reusable bool) {
	if c.written != nil && reusable {
		select {
		case err := <-c.written:
			reusable = err == nil
		default: // the engine has not read the whole request
			reusable = false
		}
	}
	if !c.stop() || !reusable || c.reader.Buffered() > 0 {
		c.Close() //nolint:errcheck // it is not used any more
		return
	}
	c.stop = nil
	c.transport.keep(c)
}

// responseBody reads a response body. Read and Close may be called at the same time.
type responseBody struct {
	from     io.Reader
	conn     *conn
	reusable bool
	mu       sync.Mutex
	ended    bool
	err      error
}

// Read reads the body. At its end, the connection can be used by another request.
func (b *responseBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	ended, err := b.ended, b.err
	b.mu.Unlock()
	if ended {
		return 0, err
	}
	n, err := b.from.Read(p)
	if err != nil {
		err = b.end(withoutText(err))
	}
	return n, err
}

// end records the end of the body, once, and returns the error for the reader.
func (b *responseBody) end(err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return b.err
	}
	b.ended = true
	if b.err = err; err == io.EOF {
		b.conn.finish(b.reusable)
		return err
	}
	if !b.conn.stop() && err != os.ErrClosed {
		b.err = context.Canceled
	}
	b.conn.Close() //nolint:errcheck // it is not used any more
	return b.err
}

// Close ends the connection unless the body was read to its end.
func (b *responseBody) Close() error {
	b.end(os.ErrClosed) //nolint:errcheck // it returns its argument
	return nil
}
