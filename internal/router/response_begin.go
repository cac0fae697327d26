// SPDX-License-Identifier: Apache-2.0

package router

import (
	"io"
	"net/http"
	"sync"

	"github.com/semmoe/operator/internal/router/wire"
)

// beginBytes is the maximum number of bytes that readBegin reads: the buffer of a connection has the same size.
const beginBytes = 4 << 10

var beginBuffers = sync.Pool{New: func() any { return new([beginBytes]byte) }}

// readBegin reads the first bytes of a response, which the body then returns again. It returns an error if the response
// breaks off before the first byte. It does not wait for the first event of a stream: the client gets the header of a
// stream at once.
func readBegin(response *http.Response) error {
	if response.Body == http.NoBody || response.ContentLength == 0 || wire.IsStream(response) {
		return nil
	}
	body := &begunBody{ReadCloser: response.Body, buffer: beginBuffers.Get().(*[beginBytes]byte)}
	n := 0
	for n == 0 && body.err == nil {
		n, body.err = response.Body.Read(body.buffer[:])
	}
	if n == 0 && body.err != io.EOF {
		body.release()
		response.Body.Close()
		return body.err
	}
	body.left = body.buffer[:n]
	response.Body = body
	return nil
}

// begunBody is a body whose first bytes were read.
type begunBody struct {
	io.ReadCloser
	buffer *[beginBytes]byte // nil once it was returned
	left   []byte
	// err is the error that followed the first bytes; nil if the rest of the body is to be read.
	err error
}

func (b *begunBody) Read(p []byte) (int, error) {
	if len(b.left) > 0 {
		n := copy(p, b.left)
		b.left = b.left[n:]
		return n, nil
	}
	b.release()
	if b.err != nil {
		return 0, b.err
	}
	return b.ReadCloser.Read(p)
}

func (b *begunBody) release() {
	if b.buffer != nil {
		beginBuffers.Put(b.buffer)
		b.buffer, b.left = nil, nil
	}
}
