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

// Why a body was not read.
var (
	ErrBodyTooBig  = errors.New("request body too large")
	ErrBodyTooSlow = errors.New("request body too slow")
	ErrBodyBroken  = errors.New("the request's body could not be read")
)

// Limits are those of a client's body.
type Limits struct {
	// MaxBodyBytes is the size of the largest one, Timeout how long it may take; 0 for ever.
	MaxBodyBytes int64
	Timeout      time.Duration
	// Memory bounds what all requests hold.
	Memory *httpserver.Memory
}

// bodyKey is where a request's context has its body.
type bodyKey struct{}

// WithBody reads the body of a request before anything else is done for it, so that a client that is slow costs no more
// than its connection. A request whose body is not read is answered by fail.
func WithBody(next http.Handler, limits Limits, fail func(http.ResponseWriter, *http.Request, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := readBody(w, r, limits)
		if err != nil {
			w.Header().Set("Connection", "close") // the rest of the body may still come
			fail(w, r, err)
			return
		}
		defer body.Drop()
		r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, body))
		r.Body, r.ContentLength = http.NoBody, 0
		next.ServeHTTP(w, r)
	})
}

// BodyOf is the body that WithBody has read; empty where it has not.
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
		connection.SetReadDeadline(time.Now().Add(limits.Timeout)) //nolint:errcheck // a test's writer has no connection
		defer connection.SetReadDeadline(time.Time{})              //nolint:errcheck // as above
	}
	interrupt := func() { connection.SetReadDeadline(time.Unix(1, 0)) } //nolint:errcheck // as above
	body, err := Read(limits.Memory, r.Body, r.ContentLength, limits.MaxBodyBytes, interrupt)
	switch {
	case errors.Is(err, ErrNoRoom):
		return nil, err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("%w: it must have come after %v", ErrBodyTooSlow, limits.Timeout)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrBodyBroken, err)
	case int64(len(body.Bytes())) > limits.MaxBodyBytes:
		body.Drop()
		return nil, tooBig
	}
	return body, nil
}

// Writer remembers the status code of a response, and ends one that its client takes nothing of for too long: the
// engine would generate it to the end, and hold its memory, for nobody.
type Writer struct {
	http.ResponseWriter
	code     int
	timeout  time.Duration
	extended time.Time
}

// NewWriter returns the writer of a response, of which the client may take nothing for so long; 0 for ever.
func NewWriter(w http.ResponseWriter, timeout time.Duration) *Writer {
	writer := &Writer{ResponseWriter: w, code: http.StatusOK, timeout: timeout}
	writer.extend() // the connection may have the end of an earlier request's time
	return writer
}

// Code is the status code of the response.
func (c *Writer) Code() int { return c.code }

// extend gives the client its time anew. What a deadline is off by does not matter, and to set it for each event of a
// stream would cost.
func (c *Writer) extend() {
	if now := time.Now(); c.timeout > 0 && now.Sub(c.extended) > c.timeout/8 {
		c.extended = now
		http.NewResponseController(c.ResponseWriter).SetWriteDeadline(now.Add(c.timeout)) //nolint:errcheck // a test's writer has no connection
	}
}

// WriteHeader passes a header on.
func (c *Writer) WriteHeader(code int) {
	c.code = code
	c.extend()
	c.ResponseWriter.WriteHeader(code)
}

// Write passes a part of a body on.
func (c *Writer) Write(data []byte) (int, error) {
	c.extend()
	return c.ResponseWriter.Write(data)
}

// Unwrap lets http.ResponseController reach Flush.
func (c *Writer) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// CopyBuffers are buffers to copy responses through.
type CopyBuffers struct{ pool sync.Pool }

// copyBufferBytes is the size that io.Copy takes.
const copyBufferBytes = 32 << 10

// Get returns a buffer.
func (c *CopyBuffers) Get() []byte {
	if buffer, ok := c.pool.Get().(*[copyBufferBytes]byte); ok {
		return buffer[:]
	}
	return make([]byte, copyBufferBytes)
}

// Put takes a buffer back.
func (c *CopyBuffers) Put(buffer []byte) { c.pool.Put((*[copyBufferBytes]byte)(buffer)) }
