// Package gatewaytest plays a gateway's side of the endpoint picker protocol in tests, and holds the other side to it.
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
)

// The keys of the protocol.
const (
	Destination = "x-gateway-destination-endpoint"
	served      = "x-gateway-destination-endpoint-served"
	subset      = "x-gateway-destination-endpoint-subset"
)

// largestChunk is what some gateways take at most.
const largestChunk = 62_000

// FullDuplex is the mode that the protocol demands.
var FullDuplex = &extprocv3.ProtocolConfiguration{
	RequestBodyMode:  processingv3.ProcessingMode_FULL_DUPLEX_STREAMED,
	ResponseBodyMode: processingv3.ProcessingMode_FULL_DUPLEX_STREAMED,
}

// NoLeaks fails a test that leaves goroutines behind. It is to be called first.
func NoLeaks(t testing.TB) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				t.Errorf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), stacks[:runtime.Stack(stacks, true)])
				return
			}
		}
	})
}

// Dial connects to a server with TLS, whoever has signed its certificate.
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
	// Cancel is what the gateway does when its client leaves.
	Cancel context.CancelFunc
	config *extprocv3.ProtocolConfiguration
}

// Open begins a request. config is nil for a gateway that does not tell its modes.
func Open(t testing.TB, connection *grpc.ClientConn, config *extprocv3.ProtocolConfiguration) *Stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	stream, err := extprocv3.NewExternalProcessorClient(connection).Process(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &Stream{t: t, stream: stream, Cancel: cancel, config: config}
}

// Of plays the gateway on a stream that is open already.
func Of(t testing.TB, stream extprocv3.ExternalProcessor_ProcessClient, config *extprocv3.ProtocolConfiguration) *Stream {
	return &Stream{t: t, stream: stream, Cancel: func() {}, config: config}
}

// Send sends a message; the first one tells the modes. One that the server no longer takes, since it has ended the stream, is no failure: what
// it has said before that tells.
func (s *Stream) Send(message *extprocv3.ProcessingRequest) {
	s.t.Helper()
	message.ProtocolConfig, s.config = s.config, nil
	if err := s.stream.Send(message); err != nil && err != io.EOF {
		s.t.Fatal(err)
	}
}

// Receive takes the next message.
func (s *Stream) Receive() *extprocv3.ProcessingResponse {
	s.t.Helper()
	message, err := s.stream.Recv()
	if err != nil {
		s.t.Fatal(err)
	}
	return message
}

// Next takes the next message, or how the server has ended the stream.
func (s *Stream) Next() (*extprocv3.ProcessingResponse, error) { return s.stream.Recv() }

// End ends the stream, and returns how the server has ended it: io.EOF where nothing is wrong.
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

// ResponseHeaders sends the header of a response; from is the endpoint that has served, empty where it is not told.
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

// RequestTrailers and ResponseTrailers send trailers.
func (s *Stream) RequestTrailers() {
	s.t.Helper()
	s.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{Trailers: headerMap(nil, map[string]string{"x-sum": "1"})}}})
}

// ResponseTrailers sends those of the response.
func (s *Stream) ResponseTrailers() {
	s.t.Helper()
	s.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{Trailers: headerMap(nil, map[string]string{"x-sum": "1"})}}})
}

// Picked takes the answer to a request's header, and returns its endpoints and what it changes in the header.
func (s *Stream) Picked() (endpoints []string, change Change) {
	s.t.Helper()
	message := s.Receive()
	if message.GetRequestHeaders() == nil {
		s.t.Fatalf("got %v, want the answer to the request's header", message)
	}
	return s.endpoints(message, message.GetRequestHeaders().GetResponse())
}

// endpoints reads those of a message, which must be the same in the header and in the metadata.
func (s *Stream) endpoints(message *extprocv3.ProcessingResponse, common *extprocv3.CommonResponse) ([]string, Change) {
	s.t.Helper()
	change := s.changeOf(common.GetHeaderMutation())
	named := change.Set[Destination]
	told := message.GetDynamicMetadata().GetFields()["envoy.lb"].GetStructValue().GetFields()[Destination].GetStringValue()
	if named == "" || named != told || !common.GetClearRouteCache() {
		s.t.Fatalf("the header names %q, the metadata %q, clear_route_cache is %v", named, told, common.GetClearRouteCache())
	}
	return strings.Split(named, ","), change
}

// PickedInOne takes the answer to a buffered body. body is nil where it stays as it is.
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

// Answered takes the answer to a response's header.
func (s *Stream) Answered() Change {
	s.t.Helper()
	message := s.Receive()
	if message.GetResponseHeaders() == nil {
		s.t.Fatalf("got %v, want the answer to the response's header", message)
	}
	return s.changeOf(message.GetResponseHeaders().GetResponse().GetHeaderMutation())
}

// Body takes the chunks of a body up to its end, or as many bytes as are given, and returns them. Of the request or of the
// response, as the first chunk is.
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

// Refused takes an answer in place of an endpoint.
func (s *Stream) Refused() (code int, change Change, body string) {
	s.t.Helper()
	message := s.Receive().GetImmediateResponse()
	if message == nil {
		s.t.Fatal("the request is not refused")
	}
	return int(message.GetStatus().GetCode()), s.changeOf(message.GetHeaders()), string(message.GetBody())
}

// Change is what a mutation does to a header: names are in lower case.
type Change struct {
	Set    map[string]string
	Remove map[string]bool
}

// Apply does it to a header, as a gateway does.
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
