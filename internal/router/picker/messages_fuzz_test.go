// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"bytes"
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// framed encodes messages as a gateway sends them.
func framed(f *testing.F, messages ...*extprocv3.ProcessingRequest) (stream []byte) {
	for _, message := range messages {
		data, err := proto.Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		stream = append(binary.BigEndian.AppendUint32(append(stream, 0), uint32(len(data))), data...)
	}
	return stream
}

// exchanged returns the messages of a request and its response.
func exchanged() []*extprocv3.ProcessingRequest {
	header := func(fields ...string) *extprocv3.HttpHeaders {
		headers := &corev3.HeaderMap{}
		for pair := range slices.Chunk(fields, 2) {
			headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: pair[0], RawValue: []byte(pair[1])})
		}
		return &extprocv3.HttpHeaders{Headers: headers}
	}
	request := func(part func(*extprocv3.ProcessingRequest)) *extprocv3.ProcessingRequest {
		message := &extprocv3.ProcessingRequest{}
		part(message)
		return message
	}
	subset := structpb.NewStringValue("10.0.0.1:8000, [::ffff:10.0.0.2]")
	return []*extprocv3.ProcessingRequest{
		request(func(m *extprocv3.ProcessingRequest) {
			m.Request = &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: header(":method", "POST", ":path", "/v1/completions?a", "content-length", "2")}
			m.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
				subsetNamespace: {Fields: map[string]*structpb.Value{subsetKey: subset}},
			}}
		}),
		request(func(m *extprocv3.ProcessingRequest) {
			m.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte("{}"), EndOfStream: true}}
		}),
		request(func(m *extprocv3.ProcessingRequest) {
			m.Request = &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: header(":status", "200", "a", "1", "A", "2")}
		}),
		request(func(m *extprocv3.ProcessingRequest) {
			m.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte("{}"), EndOfStream: true}}
		}),
	}
}

// FuzzProcess serves a call with arbitrary bytes after the header of its request. A call ends with a status, releases
// all memory, and counts its request at most once. Each message of its response has a complete frame.
func FuzzProcess(f *testing.F) {
	whole := framed(f, exchanged()...)
	f.Add(whole)
	f.Add(whole[:len(whole)-3])
	f.Add([]byte{1, 0, 0, 0, 0})
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff})
	for _, message := range exchanged() {
		f.Add(framed(f, message))
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		picker := &chooser{}
		server := NewServer(picker, Options{MaxBodyBytes: 1 << 16})
		request := httptest.NewRequest(http.MethodPost, extprocv3.ExternalProcessor_Process_FullMethodName, bytes.NewReader(stream))
		request.Header.Set("Content-Type", "application/grpc")
		recorder := httptest.NewRecorder()
		server.serveGateway(recorder, request)
		if recorder.Result().Trailer.Get("Grpc-Status") == "" {
			t.Error("the call has no status")
		}
		if held := server.memory.Held(); held != 0 {
			t.Errorf("the call leaves %d bytes of memory", held)
		}
		if len(picker.codes) > 1 || len(picker.requests) > 1 {
			t.Errorf("%d requests were picked for, the codes %v counted", len(picker.requests), picker.codes)
		}
		for answer := recorder.Body.Bytes(); len(answer) > 0; {
			if len(answer) < prefixBytes || len(answer)-prefixBytes < int(binary.BigEndian.Uint32(answer[1:])) {
				t.Fatalf("the answer ends in %q", answer)
			}
			end := prefixBytes + int(binary.BigEndian.Uint32(answer[1:]))
			if err := proto.Unmarshal(answer[prefixBytes:end], &extprocv3.ProcessingResponse{}); err != nil {
				t.Fatal(err)
			}
			answer = answer[end:]
		}
	})
}

// FuzzHeader reads the header and the metadata of arbitrary messages. No field is lost, and a mutation contains all
// fields.
func FuzzHeader(f *testing.F) {
	for _, message := range exchanged() {
		data, err := proto.Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		message := &extprocv3.ProcessingRequest{}
		if proto.Unmarshal(data, message) != nil {
			return
		}
		fields := message.GetRequestHeaders().GetHeaders()
		header, pseudo := headerOf(fields)
		want := 0
		for _, field := range fields.GetHeaders() {
			if strings.HasPrefix(field.GetKey(), ":") {
				if _, known := pseudo[field.GetKey()]; !known {
					t.Errorf("%q is missing", field.GetKey())
				}
			} else {
				want++
			}
		}
		got := 0
		for name, values := range header {
			if got += len(values); strings.HasPrefix(name, ":") {
				t.Errorf("%q is a field", name)
			}
		}
		if got != want {
			t.Errorf("%d fields of %d", got, want)
		}
		if mutation := difference(header, header); mutation != nil {
			t.Errorf("equal headers differ: %v", mutation)
		}
		if mutation := difference(http.Header{}, header); len(mutation.GetSetHeaders()) != want {
			t.Errorf("%v sets %d fields", mutation, want)
		}
		if mutation := difference(header, http.Header{}); len(mutation.GetRemoveHeaders()) != len(header) {
			t.Errorf("%v removes %d fields", mutation, len(header))
		}
		if s := subsetOf(message.GetMetadataContext()); s != nil {
			for endpoint := range s.endpoints {
				if !s.Contains(endpoint.String()) {
					t.Errorf("%s is listed and not allowed", endpoint)
				}
			}
		}
	})
}
