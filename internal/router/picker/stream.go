// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"errors"
	"io"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// chunkBytes is the maximum size of a body chunk: some gateways accept no message above 64 KiB.
const chunkBytes = 62_000

// stream is the stream of one request, with a look-ahead of one message.
type stream struct {
	*call
	ahead *extprocv3.ProcessingRequest
}

// Recv reads the next message of the gateway.
func (s *stream) Recv() (*extprocv3.ProcessingRequest, error) {
	message := &extprocv3.ProcessingRequest{}
	if err := s.receive(message); err != nil {
		return nil, err
	}
	return message, nil
}

// Send writes a message to the gateway.
func (s *stream) Send(message *extprocv3.ProcessingResponse) error { return s.send(message) }

// next returns the next message; io.EOF if the gateway has ended the stream.
func (s *stream) next() (*extprocv3.ProcessingRequest, error) {
	if message := s.ahead; message != nil {
		s.ahead = nil
		return message, nil
	}
	return s.Recv()
}

// nextRequired returns the next message where the protocol requires one; the end of the stream is then an unexpected
// EOF.
func (s *stream) nextRequired() (*extprocv3.ProcessingRequest, error) {
	message, err := s.next()
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return message, err
}

// unread pushes a message back for the following call of next.
func (s *stream) unread(message *extprocv3.ProcessingRequest) { s.ahead = message }

// direction contains the accessors that differ between requests and responses.
type direction struct {
	body     func(*extprocv3.ProcessingRequest) *extprocv3.HttpBody
	trailers func(*extprocv3.ProcessingRequest) *extprocv3.HttpTrailers
	// answer wraps the answer to a chunk of the body.
	answer func(*extprocv3.CommonResponse) *extprocv3.ProcessingResponse
}

var (
	ofRequest = direction{
		body:     (*extprocv3.ProcessingRequest).GetRequestBody,
		trailers: (*extprocv3.ProcessingRequest).GetRequestTrailers,
		answer: func(common *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
			return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: &extprocv3.BodyResponse{Response: common}}}
		},
	}
	ofResponse = direction{
		body:     (*extprocv3.ProcessingRequest).GetResponseBody,
		trailers: (*extprocv3.ProcessingRequest).GetResponseTrailers,
		answer: func(common *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
			return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: &extprocv3.BodyResponse{Response: common}}}
		},
	}
)

// errBodyIncomplete is returned if the gateway does not complete a body because it already sends its own response.
var errBodyIncomplete = errors.New("the gateway has gone on before the end of the body")

// bodyReader reads a body as it arrives. Trailers end the body and stay unread in the stream.
type bodyReader struct {
	stream *stream
	of     direction
	// beforeWait is called before waiting for the next message; nil for none.
	beforeWait func() error
	// handleInterleaved answers interleaved messages of the other direction; nil if there are none.
	handleInterleaved func(*extprocv3.ProcessingRequest) (answered bool, err error)

	rest []byte
	// trailers is true if trailers ended the body. err is the error that ended it, io.EOF at its end.
	trailers bool
	err      error
}

func (b *bodyReader) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		b.rest, b.err = b.receive()
	}
	n := copy(p, b.rest)
	if b.rest = b.rest[n:]; len(b.rest) == 0 {
		b.rest = nil // the message is not needed any more
	}
	return n, nil
}

// receive returns the next chunk. The error applies after the chunk.
func (b *bodyReader) receive() ([]byte, error) {
	if b.beforeWait != nil {
		if err := b.beforeWait(); err != nil {
			return nil, err
		}
	}
	message, err := b.stream.nextRequired()
	if err != nil {
		return nil, err
	}
	if b.handleInterleaved != nil {
		if answered, err := b.handleInterleaved(message); answered {
			return nil, err
		}
	}
	if chunk := b.of.body(message); chunk != nil {
		if chunk.GetEndOfStream() {
			err = io.EOF
		}
		return chunk.GetBody(), err
	}
	b.stream.unread(message)
	if b.of.trailers(message) == nil {
		return nil, errBodyIncomplete
	}
	b.trailers = true
	return nil, io.EOF
}

// bodyWriter sends a body to the gateway in chunks that the gateway accepts.
type bodyWriter struct {
	stream  *stream
	of      direction
	pending []byte
}

func (w *bodyWriter) Write(data []byte) (int, error) {
	for rest := data; len(rest) > 0; {
		// Each chunk needs new memory because the message keeps it.
		n := min(len(rest), chunkBytes-len(w.pending))
		w.pending, rest = append(w.pending, rest[:n]...), rest[n:]
		if len(w.pending) == chunkBytes {
			if err := w.flush(); err != nil {
				return 0, err
			}
		}
	}
	return len(data), nil
}

// flush sends what is pending, if anything.
func (w *bodyWriter) flush() error {
	if len(w.pending) == 0 {
		return nil
	}
	return w.send(false)
}

// end sends the pending data. The chunk is marked as the last one unless trailers follow.
func (w *bodyWriter) end(trailers bool) error {
	if trailers {
		return w.flush()
	}
	return w.send(true)
}

func (w *bodyWriter) send(last bool) error {
	chunk := w.pending
	w.pending = nil
	return w.stream.Send(w.of.answer(&extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
		Mutation: &extprocv3.BodyMutation_StreamedResponse{
			StreamedResponse: &extprocv3.StreamedBodyResponse{Body: chunk, EndOfStream: last},
		},
	}}))
}
