// SPDX-License-Identifier: Apache-2.0

// Package gatewaytest simulates the gateway side of the endpoint picker protocol in tests, and validates the server
// side.
package gatewaytest

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/semmoe/operator/test/load"
)

// Keys of the protocol.
const (
	Destination = "x-gateway-destination-endpoint"
	served      = "x-gateway-destination-endpoint-served"
	subset      = "x-gateway-destination-endpoint-subset"
)

// largestChunk is the maximum chunk size of some gateways.
const largestChunk = 62_000

// FullDuplex selects the body modes that the protocol requires.
var FullDuplex = &extprocv3.ProtocolConfiguration{
	RequestBodyMode:  processingv3.ProcessingMode_FULL_DUPLEX_STREAMED,
	ResponseBodyMode: processingv3.ProcessingMode_FULL_DUPLEX_STREAMED,
}

// NoLeaks fails a test that leaks goroutines. Call it first.
func NoLeaks(t testing.TB) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		var clock load.Clock
		for clock.Elapsed(); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
			if clock.Elapsed() > 10*time.Second {
				stacks := make([]byte, 1<<20)
				t.Errorf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), stacks[:runtime.Stack(stacks, true)])
				return
			}
		}
	})
}

// Dial connects to a server with TLS and does not verify its certificate.
func Dial(t testing.TB, address string) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient("dns:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return connection
}

// Stream is one request of a gateway.
type Stream struct {
	t      testing.TB
	stream extprocv3.ExternalProcessor_ProcessClient
	// Cancel simulates a disconnect of the gateway's client.
	Cancel context.CancelFunc
	config *extprocv3.ProtocolConfiguration
}

// Open starts a request. config is nil for a gateway that does not send its body modes.
func Open(t testing.TB, connection *grpc.ClientConn, config *extprocv3.ProtocolConfiguration) *Stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), load.Scale(30*time.Second))
	t.Cleanup(cancel)
	stream, err := extprocv3.NewExternalProcessorClient(connection).Process(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &Stream{t: t, stream: stream, Cancel: cancel, config: config}
}

// Of simulates the gateway on a stream that is already open.
func Of(t testing.TB, stream extprocv3.ExternalProcessor_ProcessClient, config *extprocv3.ProtocolConfiguration) *Stream {
	return &Stream{t: t, stream: stream, Cancel: func() {}, config: config}
}

// Send sends a message; the first one contains the body modes. It ignores io.EOF: if the server has ended the stream,
// the received messages show the reason.
func (s *Stream) Send(message *extprocv3.ProcessingRequest) {
	s.t.Helper()
	message.ProtocolConfig, s.config = s.config, nil
	if err := s.stream.Send(message); err != nil && err != io.EOF {
		s.t.Fatal(err)
	}
}

// Receive returns the next message.
func (s *Stream) Receive() *extprocv3.ProcessingResponse {
	s.t.Helper()
	message, err := s.stream.Recv()
	if err != nil {
		s.t.Fatal(err)
	}
	return message
}

// Next returns the next message, or the error with which the server ended the stream.
func (s *Stream) Next() (*extprocv3.ProcessingResponse, error) { return s.stream.Recv() }

// End closes the sending side and returns the error with which the server ended the stream; io.EOF on success.
func (s *Stream) End() error {
	s.t.Helper()
	if err := s.stream.CloseSend(); err != nil {
		s.t.Fatal(err)
	}
	message, err := s.stream.Recv()
	if err == nil {
		s.t.Fatalf("unexpected message at the end: %v", message)
	}
	return err
}

// RequestHeaders sends the header of a request. hint is the value of the subset hint; nil for none.
func (s *Stream) RequestHeaders(method, path string, header map[string]string, end bool, hint *structpb.Value) {
	s.t.Helper()
	message := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
		Headers: headerMap(map[string]string{":method": method, ":path": path}, header), EndOfStream: end,
	}}}
	if hint != nil {
		message.MetadataContext = metadata("envoy.lb.subset_hint", subset, hint)
	}
	s.Send(message)
}

// RequestBody sends a body in chunks.
func (s *Stream) RequestBody(body []byte, chunkBytes int, end bool) {
	s.t.Helper()
	for _, chunk := range chunks(body, chunkBytes, end) {
		s.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: chunk}})
	}
}

// ResponseHeaders sends the header of a response. from is the endpoint that served the request; empty if it is not
// reported.
func (s *Stream) ResponseHeaders(code int, header map[string]string, end bool, from string) {
	s.t.Helper()
	message := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{
		Headers: headerMap(map[string]string{":status": fmt.Sprint(code)}, header), EndOfStream: end,
	}}}
	if from != "" {
		message.MetadataContext = metadata("envoy.lb", served, structpb.NewStringValue(from))
	}
	s.Send(message)
}

// ResponseBody sends a body in chunks.
func (s *Stream) ResponseBody(body []byte, chunkBytes int, end bool) {
	s.t.Helper()
	for _, chunk := range chunks(body, chunkBytes, end) {
		s.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: chunk}})
	}
}

// RequestTrailers sends trailers of the request.
func (s *Stream) RequestTrailers() {
	s.t.Helper()
	s.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{Trailers: headerMap(nil, map[string]string{"x-sum": "1"})}}})
}

// ResponseTrailers sends trailers of the response.
func (s *Stream) ResponseTrailers() {
	s.t.Helper()
	s.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{Trailers: headerMap(nil, map[string]string{"x-sum": "1"})}}})
}

// Picked receives the answer to a request header. It returns the endpoints and the changes of the header.
func (s *Stream) Picked() (endpoints []string, change Change) {
	s.t.Helper()
	message := s.Receive()
	if message.GetRequestHeaders() == nil {
		s.t.Fatalf("got %v, want the answer to the request's header", message)
	}
	return s.endpoints(message, message.GetRequestHeaders().GetResponse())
}

// endpoints returns the endpoints of a message. It fails unless header and metadata contain the same endpoints.
func (s *Stream) endpoints(message *extprocv3.ProcessingResponse, common *extprocv3.CommonResponse) ([]string, Change) {
	s.t.Helper()
	change := s.changeOf(common.GetHeaderMutation())
	named := change.Set[Destination]
	inMetadata := message.GetDynamicMetadata().GetFields()["envoy.lb"].GetStructValue().GetFields()[Destination].GetStringValue()
	if named == "" || named != inMetadata || !common.GetClearRouteCache() {
		s.t.Fatalf("the header names %q, the metadata %q, clear_route_cache is %v", named, inMetadata, common.GetClearRouteCache())
	}
	return strings.Split(named, ","), change
}

// PickedInOne receives the answer to a buffered body. body is nil if the body is unchanged.
func (s *Stream) PickedInOne() (endpoints []string, change Change, body []byte) {
	s.t.Helper()
	message := s.Receive()
	common := message.GetRequestBody().GetResponse()
	if common == nil {
		s.t.Fatalf("got %v, want the answer to the request's body", message)
	}
	endpoints, change = s.endpoints(message, common)
	return endpoints, change, common.GetBodyMutation().GetBody()
}

// Answered receives the answer to a response header.
func (s *Stream) Answered() Change {
	s.t.Helper()
	message := s.Receive()
	if message.GetResponseHeaders() == nil {
		s.t.Fatalf("got %v, want the answer to the response's header", message)
	}
	return s.changeOf(message.GetResponseHeaders().GetResponse().GetHeaderMutation())
}

// Body receives the chunks of a body until its end, or at least the given number of bytes, and returns them. The first
// chunk determines whether it is the body of the request or of the response.
func (s *Stream) Body(bytes int) (body []byte, ended bool) {
	s.t.Helper()
	for !ended && (bytes < 0 || len(body) < bytes) {
		message := s.Receive()
		common := message.GetRequestBody().GetResponse()
		if message.GetResponseBody() != nil {
			common = message.GetResponseBody().GetResponse()
		}
		chunk := common.GetBodyMutation().GetStreamedResponse()
		if chunk == nil {
			s.t.Fatalf("got %v, want a chunk of a body", message)
		}
		if len(chunk.GetBody()) > largestChunk {
			s.t.Fatalf("a chunk has %d bytes, at most %d are allowed", len(chunk.GetBody()), largestChunk)
		}
		body, ended = append(body, chunk.GetBody()...), chunk.GetEndOfStream()
	}
	return body, ended
}

// Refused receives an immediate response.
func (s *Stream) Refused() (code int, change Change, body string) {
	s.t.Helper()
	message := s.Receive().GetImmediateResponse()
	if message == nil {
		s.t.Fatal("the request is not refused")
	}
	return int(message.GetStatus().GetCode()), s.changeOf(message.GetHeaders()), string(message.GetBody())
}

// Change describes a header mutation. Names are in lower case.
type Change struct {
	Set    map[string]string
	Remove map[string]bool
}

// Apply applies the mutation to a header like a gateway.
func (c Change) Apply(header http.Header) {
	for name := range c.Remove {
		header.Del(name)
	}
	for name, value := range c.Set {
		header.Set(name, value)
	}
}

func (s *Stream) changeOf(mutation *extprocv3.HeaderMutation) Change {
	s.t.Helper()
	c := Change{map[string]string{}, map[string]bool{}}
	for _, option := range mutation.GetSetHeaders() {
		field := option.GetHeader()
		if field.GetValue() != "" || field.GetKey() != strings.ToLower(field.GetKey()) || option.GetAppendAction() != corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD {
			s.t.Fatalf("the header is set by %v: want a lower-case name and a raw value that replaces", option)
		}
		c.Set[field.GetKey()] = string(field.GetRawValue())
	}
	for _, name := range mutation.GetRemoveHeaders() {
		c.Remove[name] = true
	}
	return c
}

func headerMap(groups ...map[string]string) *corev3.HeaderMap {
	headers := &corev3.HeaderMap{}
	for _, group := range groups {
		for name, value := range group {
			headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: name, RawValue: []byte(value)})
		}
	}
	return headers
}

func metadata(namespace, key string, value *structpb.Value) *corev3.Metadata {
	return &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{namespace: {Fields: map[string]*structpb.Value{key: value}}}}
}

func chunks(body []byte, chunkBytes int, end bool) []*extprocv3.HttpBody {
	var all []*extprocv3.HttpBody
	for len(body) > chunkBytes {
		all, body = append(all, &extprocv3.HttpBody{Body: body[:chunkBytes]}), body[chunkBytes:]
	}
	return append(all, &extprocv3.HttpBody{Body: body, EndOfStream: end})
}
