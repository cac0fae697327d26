// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/client"
)

// prefixBytes is the length of the message prefix: a compression flag and the message length.
const prefixBytes = 5

// call is one call of a gRPC method over HTTP/2 (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md). A
// server of grpc-go buffers each incomplete message, up to the maximum message size, for any number of streams. A call
// instead takes the memory for arriving data from the budget of all requests, and ends after a timeout. It serves one
// goroutine.
type call struct {
	request    *http.Request
	writer     http.ResponseWriter
	control    *http.ResponseController
	memory     *httpserver.Memory
	maxMessage int64
	// limit is the maximum time until the next message arrives, writeLimit the maximum time until the client has read a
	// message; 0 means no limit.
	limit, writeLimit time.Duration
	// holds is true if a received message counts until the next one is awaited. held is its memory.
	holds bool
	held  *httpserver.Share
	// received is the length of the latest message.
	received int64
	// unsent is true if messages were written and not flushed.
	unsent bool

	// replaced is true if another call has taken the place of this one.
	replaced atomic.Bool

	mu    sync.Mutex
	ended bool
}

// serveCall runs a method for a gRPC request. The status is sent in the trailers of the response.
func serveCall(c *call, method func(*call) error) {
	header := c.writer.Header()
	if c.request.Method != http.MethodPost || !strings.HasPrefix(c.request.Header.Get("Content-Type"), "application/grpc") {
		// A body would wait for a client that reads nothing.
		header.Set("Grpc-Message", "this port serves gRPC: POST with content-type application/grpc")
		c.writer.WriteHeader(http.StatusUnsupportedMediaType)
		return
	}
	header.Set("Content-Type", "application/grpc")
	header.Set("Trailer", "Grpc-Status, Grpc-Message")
	c.writer.WriteHeader(http.StatusOK)
	err := method(c)
	c.release()
	if flushErr := c.flush(); err == nil {
		err = flushErr
	}
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.control.Flush() //nolint:errcheck // a disconnected client needs no header
	result := status.Convert(err)
	switch {
	case err == nil:
		result = status.New(codes.OK, "")
	case errors.Is(err, client.ErrNoMemory):
		result = status.New(codes.ResourceExhausted, err.Error())
	}
	header.Set("Grpc-Status", strconv.Itoa(int(result.Code())))
	if message := result.Message(); message != "" {
		header.Set("Grpc-Message", percentEncoded(message))
	}
}

// percentEncoded encodes a message for the Grpc-Message header.
func percentEncoded(message string) string {
	var b strings.Builder
	for i := range len(message) {
		if c := message[i]; c < ' ' || c > '~' || c == '%' {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// Context returns the context of the request, which ends with the call.
func (c *call) Context() context.Context { return c.request.Context() }

// interrupt returns a function that ends a blocked Read or Write and all later ones. Another goroutine may call it.
func (c *call) interrupt(set func(time.Time) error) func() {
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.ended { // net/http reuses the writer of a request that has ended
			set(time.Unix(1, 0)) //nolint:errcheck // the connection has ended
		}
	}
}

// withLimit ends a Read or Write after the limit, unless stop is called before.
func (c *call) withLimit(limit time.Duration, set func(time.Time) error) (stop func()) {
	if limit == 0 {
		return func() {}
	}
	timer := time.AfterFunc(limit, c.interrupt(set))
	return func() { timer.Stop() }
}

// hold counts a received message, and the chunk of it that is sent, until release. If another call needs the memory, the
// call of the largest message is interrupted: its client does not read the answers.
func (c *call) hold(length int64) error {
	if !c.holds {
		return nil
	}
	if c.held == nil {
		read, write := c.interrupt(c.control.SetReadDeadline), c.interrupt(c.control.SetWriteDeadline)
		c.held = c.memory.Open(func() {
			read()
			go write() // it resets the stream, which may take time
		})
	}
	return c.held.Take(length + 2*min(length, chunkBytes))
}

// release releases the memory of the latest message.
func (c *call) release() {
	if c.held != nil {
		c.held.Release()
	}
}

// receive sends what was written and reads the next message. It returns io.EOF if the client has closed its side.
func (c *call) receive(into proto.Message) error {
	c.release()
	if err := c.flush(); err != nil {
		return err
	}
	stop := c.withLimit(c.limit, c.control.SetReadDeadline)
	defer stop()
	var prefix [prefixBytes]byte
	if _, err := io.ReadFull(c.request.Body, prefix[:]); err != nil {
		return c.failed(err)
	}
	length := int64(binary.BigEndian.Uint32(prefix[1:]))
	switch {
	case prefix[0] != 0:
		return status.Error(codes.Unimplemented, "a message is compressed: grpc-encoding must be identity")
	case length > c.maxMessage:
		return status.Errorf(codes.ResourceExhausted, "a message has %d bytes: at most %d are accepted", length, c.maxMessage)
	}
	message, err := client.Read(c.memory, io.LimitReader(c.request.Body, length), length, length, c.interrupt(c.control.SetReadDeadline))
	if err != nil {
		return c.failed(err)
	}
	defer message.Drop()
	if int64(len(message.Bytes())) < length {
		return io.ErrUnexpectedEOF
	}
	c.received = length
	if err := c.hold(length); err != nil {
		return err
	}
	if err := proto.Unmarshal(message.Bytes(), into); err != nil {
		return status.Errorf(codes.InvalidArgument, "failed to decode a message: %v", err)
	}
	return nil
}

// failed converts the error of a Read or Write to a status if the call was canceled or timed out.
func (c *call) failed(err error) error {
	switch {
	case c.request.Context().Err() != nil:
		return status.FromContextError(c.request.Context().Err()).Err()
	case c.replaced.Load():
		return errTooManyStreams
	case errors.Is(err, os.ErrDeadlineExceeded):
		return status.Errorf(codes.DeadlineExceeded, "the next message has not arrived within %v", c.limit)
	}
	return err
}

// send writes a message. It is sent before the call waits for the next message, at its end, or by flush: several answers
// in a row take one system call.
func (c *call) send(message proto.Message) error {
	size := proto.Size(message)
	if size > 2*chunkBytes { // a complete body, which was made for this message
		copies := c.memory.Open(nil)
		if err := errors.Join(copies.Finish(), copies.Take(2*int64(size))); err != nil {
			return err
		}
		defer copies.Release()
	}
	data, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, prefixBytes, prefixBytes+size), message)
	if err != nil {
		return status.Errorf(codes.Internal, "failed to encode a message: %v", err)
	}
	binary.BigEndian.PutUint32(data[1:prefixBytes], uint32(len(data)-prefixBytes))
	stop := c.withLimit(c.writeLimit, c.control.SetWriteDeadline)
	defer stop()
	c.unsent = true
	_, err = c.writer.Write(data)
	return c.failed(err)
}

// flush sends what was written.
func (c *call) flush() error {
	if !c.unsent {
		return nil
	}
	c.unsent = false
	stop := c.withLimit(c.writeLimit, c.control.SetWriteDeadline)
	defer stop()
	return c.failed(c.control.Flush())
}
