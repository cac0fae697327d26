// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/semmoe/operator/internal/httpserver"
)

// Reasons why a body was not read.
var (
	ErrBodyTooBig  = errors.New("request body too large")
	ErrBodyTooSlow = errors.New("request body too slow")
	ErrBodyBroken  = errors.New("failed to read the request body")
)

// Limits are the limits of a client body.
type Limits struct {
	// MaxBodyBytes is the maximum size. Timeout is the maximum time for the body to arrive; 0 means no limit.
	MaxBodyBytes int64
	Timeout      time.Duration
	// Memory bounds the memory of all requests.
	Memory *httpserver.Memory
}

// bodyKey is the context key of the body.
type bodyKey struct{}

// WithBody reads the body of a request before the request is handled, so that a slow client costs only its connection.
// fail answers a request if its body was not read.
func WithBody(next http.Handler, limits Limits, fail func(http.ResponseWriter, *http.Request, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := readBody(w, r, limits)
		if err != nil {
			w.Header().Set("Connection", "close") // the rest of the body may still arrive
			fail(w, r, err)
			return
		}
		defer body.Drop()
		r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, body))
		r.Body, r.ContentLength = http.NoBody, 0
		next.ServeHTTP(w, r)
	})
}

// BodyOf returns the body that WithBody has read; empty if WithBody was not used.
func BodyOf(r *http.Request) *Body {
	if body, ok := r.Context().Value(bodyKey{}).(*Body); ok {
		return body
	}
	return NewBody(nil)
}

func readBody(w http.ResponseWriter, r *http.Request, limits Limits) (*Body, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return NewBody(nil), nil
	}
	tooBig := fmt.Errorf("%w: at most %d bytes are accepted", ErrBodyTooBig, limits.MaxBodyBytes)
	if r.ContentLength > limits.MaxBodyBytes {
		return nil, tooBig
	}
	defer httpserver.BodyArrives(r)()
	connection := http.NewResponseController(w)
	if limits.Timeout > 0 {
		connection.SetReadDeadline(time.Now().Add(limits.Timeout)) //nolint:errcheck // the writers of tests have no connection
		defer connection.SetReadDeadline(time.Time{})              //nolint:errcheck // as above
	}
	interrupt := func() { connection.SetReadDeadline(time.Unix(1, 0)) } //nolint:errcheck // as above
	body, err := Read(limits.Memory, r.Body, r.ContentLength, limits.MaxBodyBytes, interrupt)
	switch {
	case errors.Is(err, ErrNoMemory):
		return nil, err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("%w: it must arrive within %v, or within %v once the server stops", ErrBodyTooSlow, limits.Timeout, httpserver.BodyShutdownTimeout)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrBodyBroken, err)
	case int64(len(body.Bytes())) > limits.MaxBodyBytes:
		body.Drop()
		return nil, tooBig
	}
	return body, nil
}

// Writer records the status code of a response. It aborts a response that the client does not read for too long:
// without the limit, the engine would generate it to the end and hold its memory.
type Writer struct {
	http.ResponseWriter
	code     int
	timeout  time.Duration
	extended time.Time
}

// NewWriter returns the writer of a response. timeout is the maximum time that the client may read nothing; 0 means no
// limit.
func NewWriter(w http.ResponseWriter, timeout time.Duration) *Writer {
	writer := &Writer{ResponseWriter: w, code: http.StatusOK, timeout: timeout}
	writer.extend() // the connection may still have the deadline of an earlier request
	return writer
}

// Code returns the status code of the response.
func (c *Writer) Code() int { return c.code }

// extend moves the write deadline. It does so only after an eighth of the timeout, because setting the deadline for
// each event of a stream is expensive.
func (c *Writer) extend() {
	if now := time.Now(); c.timeout > 0 && now.Sub(c.extended) > c.timeout/8 {
		c.extended = now
		http.NewResponseController(c.ResponseWriter).SetWriteDeadline(now.Add(c.timeout)) //nolint:errcheck // the writers of tests have no connection
	}
}

// WriteHeader writes the header.
func (c *Writer) WriteHeader(code int) {
	c.code = code
	c.extend()
	c.ResponseWriter.WriteHeader(code)
}

// Write writes a part of the body.
func (c *Writer) Write(data []byte) (int, error) {
	c.extend()
	return c.ResponseWriter.Write(data)
}

// Unwrap gives http.ResponseController access to Flush.
func (c *Writer) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// CopyBuffers is a pool of buffers for copying responses.
type CopyBuffers struct{ pool sync.Pool }

// copyBufferBytes is the buffer size of io.Copy.
const copyBufferBytes = 32 << 10

// Get returns a buffer.
func (c *CopyBuffers) Get() []byte {
	if buffer, ok := c.pool.Get().(*[copyBufferBytes]byte); ok {
		return buffer[:]
	}
	return make([]byte, copyBufferBytes)
}

// Put returns a buffer to the pool.
func (c *CopyBuffers) Put(buffer []byte) { c.pool.Put((*[copyBufferBytes]byte)(buffer)) }
