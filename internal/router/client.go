package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
)

var (
	errBodyTooBig  = errors.New("request body too large")
	errBodyTooSlow = errors.New("request body too slow")
	errBodyBroken  = errors.New("the request's body could not be read")
)

// bodyKey is where a request's context has its body.
type bodyKey struct{}

// withBody reads the body of a request before anything else is done for it, so that a client that is slow costs no more
// than its connection.
func withBody(next http.Handler, options ProxyOptions, log logr.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := readBody(w, r, options)
		if err != nil {
			w.Header().Set("Connection", "close") // the rest of the body may still come
			writeFailure(w, r, err, log)
			return
		}
		r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, body))
		r.Body, r.ContentLength = http.NoBody, 0
		next.ServeHTTP(w, r)
	})
}

// bodyOf is the body that withBody has read.
func bodyOf(r *http.Request) []byte {
	body, _ := r.Context().Value(bodyKey{}).([]byte)
	return body
}

// trustedBytes is how much memory is made ready for a body because its header says so, before any of it has come.
const trustedBytes = 64 << 10

func readBody(w http.ResponseWriter, r *http.Request, options ProxyOptions) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, nil
	}
	tooBig := fmt.Errorf("%w: at most %d bytes are accepted", errBodyTooBig, options.MaxBodyBytes)
	if r.ContentLength > options.MaxBodyBytes {
		return nil, tooBig
	}
	if options.ClientTimeout > 0 {
		connection := http.NewResponseController(w)
		connection.SetReadDeadline(time.Now().Add(options.ClientTimeout)) //nolint:errcheck // a test's writer has no connection
		defer connection.SetReadDeadline(time.Time{})                     //nolint:errcheck // as above
	}
	body, err := readAll(io.LimitReader(r.Body, options.MaxBodyBytes+1), r.ContentLength)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("%w: it must have come after %v", errBodyTooSlow, options.ClientTimeout)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errBodyBroken, err)
	case int64(len(body)) > options.MaxBodyBytes:
		return nil, tooBig
	}
	return body, nil
}

// readAll is io.ReadAll for a length that is probably known; -1 where it is not.
func readAll(from io.Reader, length int64) ([]byte, error) {
	buffer := make([]byte, 0, max(512, min(length, trustedBytes)+1)) // one more, to meet the end without growing
	for {
		n, err := from.Read(buffer[len(buffer):cap(buffer)])
		buffer = buffer[:len(buffer)+n]
		if err == io.EOF {
			return buffer, nil
		}
		if err != nil {
			return nil, err
		}
		if len(buffer) == cap(buffer) {
			buffer = append(buffer, 0)[:len(buffer)]
		}
	}
}

// clientWriter remembers the status code of a response, and ends one that its client takes nothing of for too long: the
// engine would generate it to the end, and hold its memory, for nobody.
type clientWriter struct {
	http.ResponseWriter
	code     int
	timeout  time.Duration
	extended time.Time
}

// extend gives the client its time anew. What a deadline is off by does not matter, and to set it for each event of a
// stream would cost.
func (c *clientWriter) extend() {
	if now := time.Now(); c.timeout > 0 && now.Sub(c.extended) > c.timeout/8 {
		c.extended = now
		http.NewResponseController(c.ResponseWriter).SetWriteDeadline(now.Add(c.timeout)) //nolint:errcheck // a test's writer has no connection
	}
}

func (c *clientWriter) WriteHeader(code int) {
	c.code = code
	c.extend()
	c.ResponseWriter.WriteHeader(code)
}

func (c *clientWriter) Write(data []byte) (int, error) {
	c.extend()
	return c.ResponseWriter.Write(data)
}

// Unwrap lets http.ResponseController reach Flush.
func (c *clientWriter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// copyBuffers are buffers to copy responses through.
type copyBuffers struct{ pool sync.Pool }

// copyBufferBytes is the size that io.Copy takes.
const copyBufferBytes = 32 << 10

func (c *copyBuffers) Get() []byte {
	if buffer, ok := c.pool.Get().(*[copyBufferBytes]byte); ok {
		return buffer[:]
	}
	return make([]byte, copyBufferBytes)
}

func (c *copyBuffers) Put(buffer []byte) { c.pool.Put((*[copyBufferBytes]byte)(buffer)) }
