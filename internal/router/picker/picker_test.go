// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

const maxBody = 1 << 20

// TestPicksOnceTheBodyIsComplete checks that a pick uses the complete body, for any chunk size. The body is returned
// unchanged, or as the Picker has changed it, in chunks that a gateway accepts.
func TestPicksOnceTheBodyIsComplete(t *testing.T) {
	changed := randomBytes(100_001)
	cases := map[string]struct {
		body     []byte
		chunk    int
		trailers bool
		changed  []byte
		noModes  bool // the gateway does not send its modes
	}{
		"one chunk":               {body: []byte(`{"prompt":"x"}`), chunk: 1000},
		"a byte each":             {body: randomBytes(3000), chunk: 1},
		"more than a message":     {body: randomBytes(300_000), chunk: 65_536},
		"chunks of the limit":     {body: randomBytes(3 * chunkBytes), chunk: chunkBytes},
		"the largest body":        {body: randomBytes(maxBody), chunk: 200_000},
		"an empty body":           {body: nil, chunk: 1},
		"trailers":                {body: randomBytes(70_000), chunk: 10_000, trailers: true},
		"trailers only":           {body: nil, chunk: 1, trailers: true},
		"changed":                 {body: []byte("{}"), chunk: 1, changed: changed},
		"changed, with trailers":  {body: []byte("{}"), chunk: 1, changed: changed, trailers: true},
		"modes that are not sent": {body: []byte("{}"), chunk: 1, noModes: true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := &chooser{decision: Decision{Body: tc.changed, SetHeaders: map[string]string{"X-Rank": "3", "X-Same": "same"}, RemoveHeaders: []string{"X-Drop", "X-None"}}}
			config := gatewaytest.FullDuplex
			if tc.noModes {
				config = nil
			}
			s := open(t, c, config)
			s.RequestHeaders("POST", "/v1/completions?a=b", map[string]string{"x-rank": "7", "x-drop": "1", "x-same": "same", "content-length": fmt.Sprint(len(tc.body))}, false, nil)
			s.RequestBody(tc.body, tc.chunk, !tc.trailers)
			if tc.trailers {
				s.RequestTrailers()
			}
			endpoints, change := s.Picked()
			if !slices.Equal(endpoints, []string{"10.0.0.1:8000", "10.0.0.2:8000"}) {
				t.Errorf("endpoints %v", endpoints)
			}
			want, length := tc.body, ""
			if tc.changed != nil {
				want, length = tc.changed, fmt.Sprint(len(tc.changed))
			}
			if change.Set["content-length"] != length || change.Set["x-rank"] != "3" || !change.Remove["x-drop"] || len(change.Remove) != 1 || change.Set["x-same"] != "" {
				t.Errorf("the header is changed by %v", change)
			}
			bytesWanted := -1
			if tc.trailers { // no chunk is marked as the last one
				bytesWanted = len(want)
			}
			if got, ended := s.Body(bytesWanted); !bytes.Equal(got, want) || ended == tc.trailers {
				t.Errorf("%d bytes came back, ended %v; want %d", len(got), ended, len(want))
			}
			if tc.trailers {
				if message := s.Receive(); message.GetRequestTrailers() == nil {
					t.Errorf("got %v, want the answer to the trailers", message)
				}
			}
			r := c.asked(t)
			if r.Method != "POST" || r.Path != "/v1/completions" || !bytes.Equal(r.Body, tc.body) || r.BodyFixed || r.ResponseFixed || r.Header.Get("X-Rank") != "7" || r.Subset != nil {
				t.Errorf("asked for %s %s with %d bytes and header %v", r.Method, r.Path, len(r.Body), r.Header)
			}
			if err := s.End(); err != io.EOF {
				t.Errorf("the stream ended with %v", err)
			}
			c.ended(t, 1, clientLeft)
		})
	}
}

// TestPicksWithoutABody checks that a request without a body needs no further message, and that header values in text
// form are accepted.
func TestPicksWithoutABody(t *testing.T) {
	c := &chooser{}
	s := open(t, c, gatewaytest.FullDuplex)
	s.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{EndOfStream: true, Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		{Key: ":method", Value: "GET"}, {Key: ":path", RawValue: []byte("/v1/models"), Value: "/other"}, {Key: "accept", Value: "a"}, {Key: "accept", Value: "b"},
	}}}}})
	s.Picked()
	if r := c.asked(t); r.Method != "GET" || r.Path != "/v1/models" || !slices.Equal(r.Header["Accept"], []string{"a", "b"}) || r.BodyFixed {
		t.Errorf("asked for %+v", r)
	}
	s.ResponseHeaders(200, nil, true, "")
	s.Answered()
	c.ended(t, 1, 200) // before the gateway ends the stream
	if err := s.End(); err != io.EOF {
		t.Error(err)
	}
}

func TestSubset(t *testing.T) {
	list := func(texts ...any) *structpb.Value {
		value, err := structpb.NewList(texts)
		if err != nil {
			t.Fatal(err)
		}
		return structpb.NewListValue(value)
	}
	endpoints := []string{"10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000", "name:8000", ""}
	cases := map[string]struct {
		hint *structpb.Value
		want []string
	}{
		"list":             {list("10.0.0.1:8000", "10.0.0.2:8000"), []string{"10.0.0.1:8000", "10.0.0.2:8000"}},
		"commas":           {structpb.NewStringValue("10.0.0.1:8001, [fd00::1]:8000"), []string{"10.0.0.1:8001", "[fd00::1]:8000"}},
		"all ports":        {structpb.NewStringValue("10.0.0.1"), []string{"10.0.0.1:8000", "10.0.0.1:8001"}},
		"all ports of v6":  {list("fd00::1"), []string{"[fd00::1]:8000"}},
		"in brackets":      {list("[fd00::1]"), []string{"[fd00::1]:8000"}},
		"another spelling": {list("[fd00:0::1]:8000", "::ffff:10.0.0.2"), []string{"10.0.0.2:8000", "[fd00::1]:8000"}},
		"none of the pool": {list("10.9.9.9:8000"), nil},
		"empty list":       {list(), nil},
		"empty text":       {structpb.NewStringValue(""), nil},
		"no addresses":     {list("x", 7.0, nil, "10.0.0.1:", ":8000", "10.0.0.1:99999"), nil},
		"of another type":  {structpb.NewNumberValue(8), nil},
		"null":             {structpb.NewNullValue(), nil},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := &chooser{}
			s := open(t, c, gatewaytest.FullDuplex)
			s.RequestHeaders("GET", "/", nil, true, tc.hint)
			s.Picked()
			var got []string
			for _, endpoint := range endpoints {
				if c.asked(t).Subset.Contains(endpoint) {
					got = append(got, endpoint)
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("%v are allowed, want %v", got, tc.want)
			}
		})
	}
}

func TestRefuses(t *testing.T) {
	large := fmt.Sprint(maxBody + 1)
	cases := map[string]struct {
		err        error
		header     map[string]string
		body       []byte
		end        bool
		code       int
		kind       string
		message    string
		retryAfter string
	}{
		"no endpoint":            {err: fmt.Errorf("%w: none of these", ErrNoEndpoint), end: true, code: 503, kind: "service_unavailable", message: "no endpoint: none of these", retryAfter: "5"},
		"no endpoint for a body": {err: ErrNoEndpoint, body: []byte("{}"), code: 503, kind: "service_unavailable", message: "no endpoint", retryAfter: "5"},
		"all full":               {err: ErrAllFull, body: []byte("{}"), code: 429, kind: "rate_limit_exceeded", message: "all endpoints are full", retryAfter: "1"},
		"no route":               {err: ErrNoRoute, end: true, code: 404, kind: "not_found", message: "not found"},
		"another error":          {err: errors.New("secret"), end: true, code: 502, kind: "bad_gateway", message: "the request could not be forwarded to a serving pod"},
		"too large, by header":   {header: map[string]string{"content-length": large}, code: 413, kind: "invalid_request_error", message: "request body too large: at most 1048576 bytes are accepted"},
		"too large":              {body: make([]byte, maxBody+1), code: 413, kind: "invalid_request_error", message: "request body too large: at most 1048576 bytes are accepted"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := &chooser{err: tc.err}
			s := open(t, c, gatewaytest.FullDuplex)
			s.RequestHeaders("POST", "/v1/completions", tc.header, tc.end, nil)
			if tc.body != nil {
				s.RequestBody(tc.body, 65_536, true)
			}
			code, change, body := s.Refused()
			var answer struct {
				Error struct {
					Message, Type string
					Code          int
				}
			}
			if err := json.Unmarshal([]byte(body), &answer); err != nil {
				t.Fatal(err)
			}
			if code != tc.code || answer.Error.Code != tc.code || answer.Error.Type != tc.kind || answer.Error.Message != tc.message {
				t.Errorf("code %d, body %s", code, body)
			}
			if change.Set["content-type"] != "application/json" || change.Set["retry-after"] != tc.retryAfter {
				t.Errorf("the header is %v", change)
			}
			if _, err := s.Next(); err != io.EOF {
				t.Errorf("the stream ended with %v", err)
			}
			c.ended(t, 0, tc.code)
		})
	}
}

// TestReleasesEverything checks that everything is released and the request is counted, wherever a client disconnects
// or a gateway ends the stream.
func TestReleasesEverything(t *testing.T) {
	stages := []struct {
		name     string
		play     func(*gatewaytest.Stream)
		released int
		code     int
		whole    bool // the response is read whole before it is answered
	}{
		{"before the header", func(*gatewaytest.Stream) {}, 0, clientLeft, false},
		{"in the body", func(s *gatewaytest.Stream) {
			s.RequestHeaders("POST", "/", nil, false, nil)
			s.RequestBody([]byte("abc"), 1, false)
		}, 0, clientLeft, false},
		{"after the pick", func(s *gatewaytest.Stream) {
			s.RequestHeaders("POST", "/", nil, true, nil)
			s.Picked()
		}, 1, clientLeft, false},
		{"in the response", func(s *gatewaytest.Stream) {
			s.RequestHeaders("POST", "/", nil, true, nil)
			s.Picked()
			s.ResponseHeaders(200, nil, false, "")
			s.Answered()
			s.ResponseBody([]byte("abc"), 1, false)
			s.Body(3)
		}, 1, 200, false},
		{"in a response that is read whole", func(s *gatewaytest.Stream) {
			s.RequestHeaders("POST", "/", nil, true, nil)
			s.Picked()
			s.ResponseHeaders(200, nil, false, "")
			s.ResponseBody([]byte("abc"), 1, false)
		}, 1, 200, true},
	}
	for _, stage := range stages {
		for _, leaves := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, client leaves %v", stage.name, leaves), func(t *testing.T) {
				began := make(chan struct{})
				c := &chooser{}
				if stage.whole {
					c.modify = func(r *http.Response) error {
						close(began)
						_, err := io.ReadAll(r.Body)
						return err
					}
				}
				s := open(t, c, gatewaytest.FullDuplex)
				stage.play(s)
				if stage.whole {
					<-began // nothing is answered yet that would show it
				}
				if leaves {
					s.Cancel()
				} else if err := s.End(); err != io.EOF {
					t.Errorf("the stream ended with %v", err)
				}
				c.ended(t, stage.released, stage.code)
			})
		}
	}
	t.Run("while it is picked for", func(t *testing.T) {
		picking := make(chan struct{})
		c := &chooser{pick: func(ctx context.Context, _ *Request) error {
			close(picking)
			<-ctx.Done()
			return ctx.Err()
		}}
		s := open(t, c, gatewaytest.FullDuplex)
		s.RequestHeaders("GET", "/", nil, true, nil)
		<-picking
		s.Cancel()
		c.ended(t, 0, clientLeft)
	})
}

// TestSilentStreamsEnd checks that a stream whose next message does not arrive in time ends, and that the memory of what has
// arrived is released.
func TestSilentStreamsEnd(t *testing.T) {
	for name, send := range map[string]func(*gatewaytest.Stream){
		"nothing":  func(*gatewaytest.Stream) {},
		"a header": func(s *gatewaytest.Stream) { s.RequestHeaders("POST", "/", nil, false, nil) },
		"half of a body": func(s *gatewaytest.Stream) {
			s.RequestHeaders("POST", "/", nil, false, nil)
			s.RequestBody(make([]byte, 1<<20), 64<<10, false)
		},
	} {
		t.Run(name, func(t *testing.T) {
			memory := client.NewMemory(1 << 30)
			config, err := TLSConfig("", "", "")
			if err != nil {
				t.Fatal(err)
			}
			_, address, _ := serveOptions(t, &chooser{}, Options{Log: logr.Discard(), TLS: config, MaxBodyBytes: 4 << 20, RequestTimeout: 200 * time.Millisecond, Memory: memory})
			s := gatewaytest.Open(t, gatewaytest.Dial(t, address), gatewaytest.FullDuplex)
			send(s)
			if _, err := s.Next(); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("the stream ends with %v", err)
			}
			if held := memory.Held(); held != 0 {
				t.Errorf("%d bytes are held", held)
			}
		})
	}
}

// TestTheGatewayAnswersFirst checks that a gateway may answer a request before the body is complete. Nothing is picked,
// and the response is forwarded.
func TestTheGatewayAnswersFirst(t *testing.T) {
	c := &chooser{}
	s := open(t, c, gatewaytest.FullDuplex)
	s.RequestHeaders("POST", "/", nil, false, nil)
	s.RequestBody([]byte("abc"), 1, false)
	s.ResponseHeaders(408, nil, false, "")
	if change := s.Answered(); len(change.Set)+len(change.Remove) != 0 {
		t.Errorf("the header is changed by %v", change)
	}
	s.RequestBody([]byte("too late"), 100, true)
	s.ResponseBody([]byte("timeout"), 100, true)
	if got, ended := s.Body(-1); string(got) != "timeout" || !ended {
		t.Errorf("%q came back, ended %v", got, ended)
	}
	if err := s.End(); err != io.EOF {
		t.Error(err)
	}
	if len(c.requests) != 0 {
		t.Error("an endpoint was picked all the same")
	}
	c.ended(t, 0, 408)
}

// TestOtherBodyModes checks that in other modes, a gateway always gets endpoints, and a changed body if it sends the
// complete one.
func TestOtherBodyModes(t *testing.T) {
	const none, streamed, buffered, partial = processingv3.ProcessingMode_NONE, processingv3.ProcessingMode_STREAMED, processingv3.ProcessingMode_BUFFERED, processingv3.ProcessingMode_BUFFERED_PARTIAL
	shorter := func(r *http.Response) error {
		data, err := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(bytes.TrimSuffix(data, []byte("!"))))
		r.Header.Set("Content-Length", fmt.Sprint(len(data)-1))
		return err
	}
	for _, tc := range []struct {
		mode    processingv3.ProcessingMode_BodySendMode
		changed []byte
		want    []byte
	}{
		{buffered, nil, nil}, {buffered, []byte("other"), []byte("other")}, {partial, []byte("other"), nil},
	} {
		t.Run(fmt.Sprintf("request %s, changed %v", tc.mode, tc.changed != nil), func(t *testing.T) {
			c := &chooser{decision: Decision{Body: tc.changed}, modify: shorter}
			s := open(t, c, modes(tc.mode, buffered))
			s.RequestHeaders("POST", "/", map[string]string{"content-length": "3"}, false, nil)
			if message := s.Receive(); message.GetRequestHeaders() == nil || message.GetDynamicMetadata() != nil {
				t.Fatalf("got %v", message)
			}
			s.RequestBody([]byte("abc"), 100, true)
			endpoints, change, body := s.PickedInOne()
			if len(endpoints) != 2 || !bytes.Equal(body, tc.want) || (change.Set["content-length"] != "") != (tc.want != nil) {
				t.Errorf("endpoints %v, body %q, header %v", endpoints, body, change)
			}
			if r := c.asked(t); string(r.Body) != "abc" || r.BodyFixed != (tc.mode == partial) || r.ResponseFixed {
				t.Errorf("asked for %+v", r)
			}
			s.ResponseHeaders(200, map[string]string{"content-length": "5"}, false, "")
			if change := s.Answered(); len(change.Set) != 0 {
				t.Errorf("the header is changed by %v before the body is known", change)
			}
			s.ResponseBody([]byte("done!"), 100, true)
			common := s.Receive().GetResponseBody().GetResponse()
			if string(common.GetBodyMutation().GetBody()) != "done" || string(common.GetHeaderMutation().GetSetHeaders()[0].GetHeader().GetRawValue()) != "4" {
				t.Errorf("got %v", common)
			}
			if err := s.End(); err != io.EOF {
				t.Error(err)
			}
			c.ended(t, 1, 200)
		})
	}
	for _, mode := range []processingv3.ProcessingMode_BodySendMode{none, streamed} {
		t.Run("request and response "+mode.String(), func(t *testing.T) {
			c := &chooser{decision: Decision{Body: []byte("never sent")}, modify: func(r *http.Response) error {
				r.Header.Set("X-Semmoe-Pod", "a")
				r.Body = io.NopCloser(strings.NewReader("never sent"))
				return nil
			}}
			s := open(t, c, modes(mode, mode))
			s.RequestHeaders("POST", "/", map[string]string{"content-length": "3"}, false, nil)
			if _, change := s.Picked(); change.Set["content-length"] != "" {
				t.Errorf("the header is changed by %v", change)
			}
			if r := c.asked(t); r.Body != nil || !r.BodyFixed || !r.ResponseFixed {
				t.Errorf("asked for %+v", r)
			}
			unchanged := func(common *extprocv3.CommonResponse, present bool) {
				t.Helper()
				if !present || common.GetBodyMutation() != nil {
					t.Errorf("a chunk is answered by %v, present %v", common, present)
				}
			}
			if mode == streamed { // the response may begin before the request has ended
				s.RequestBody([]byte("abc"), 1, false)
				for range 3 {
					body := s.Receive().GetRequestBody()
					unchanged(body.GetResponse(), body != nil)
				}
			}
			s.ResponseHeaders(200, nil, false, "")
			if change := s.Answered(); change.Set["x-semmoe-pod"] != "a" {
				t.Errorf("the header is changed by %v", change)
			}
			if mode == streamed {
				s.RequestBody([]byte("d"), 1, true)
				body := s.Receive().GetRequestBody()
				unchanged(body.GetResponse(), body != nil)
				s.ResponseBody([]byte("ef"), 1, true)
				for range 2 {
					body := s.Receive().GetResponseBody()
					unchanged(body.GetResponse(), body != nil)
				}
				c.ended(t, 1, 200) // before the gateway ends the stream
			}
			if err := s.End(); err != io.EOF {
				t.Error(err)
			}
			c.ended(t, 1, 200)
		})
	}
	t.Run("a request may go on while its response comes", func(t *testing.T) {
		s := open(t, &chooser{}, modes(streamed, processingv3.ProcessingMode_FULL_DUPLEX_STREAMED))
		s.RequestHeaders("POST", "/", nil, false, nil)
		s.Picked()
		s.ResponseHeaders(200, nil, false, "")
		s.Answered()
		s.RequestBody([]byte("a"), 1, false)
		if message := s.Receive(); message.GetRequestBody() == nil {
			t.Errorf("got %v", message)
		}
		s.RequestTrailers()
		if message := s.Receive(); message.GetRequestTrailers() == nil {
			t.Errorf("got %v", message)
		}
		s.ResponseBody([]byte("b"), 1, true)
		if got, ended := s.Body(-1); string(got) != "b" || !ended {
			t.Errorf("%q came back, ended %v", got, ended)
		}
		if err := s.End(); err != io.EOF {
			t.Error(err)
		}
	})
}

func TestRejectsWhatItCannotServe(t *testing.T) {
	header := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{EndOfStream: true}}}
	cases := map[string]struct {
		config   *extprocv3.ProtocolConfiguration
		messages []*extprocv3.ProcessingRequest
		code     codes.Code
		says     string
	}{
		"no request header": {gatewaytest.FullDuplex, []*extprocv3.ProcessingRequest{{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{}}}}, codes.InvalidArgument, "request_header_mode must be SEND"},
		"an unknown mode":   {modes(processingv3.ProcessingMode_GRPC, processingv3.ProcessingMode_NONE), []*extprocv3.ProcessingRequest{header}, codes.Unimplemented, "request_body_mode: GRPC"},
		"no status": {gatewaytest.FullDuplex, []*extprocv3.ProcessingRequest{header,
			{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{}}}}, codes.InvalidArgument, `:status: ""`},
		"a body after the end": {gatewaytest.FullDuplex, []*extprocv3.ProcessingRequest{header,
			{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{}}}}, codes.InvalidArgument, "unexpected message"},
		"an empty message": {gatewaytest.FullDuplex, []*extprocv3.ProcessingRequest{header, {}}, codes.InvalidArgument, "unexpected message"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := &chooser{}
			s := open(t, c, tc.config)
			for _, message := range tc.messages {
				s.Send(message)
			}
			err := error(nil)
			for err == nil {
				_, err = s.Next()
			}
			if status.Code(err) != tc.code || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("the stream ended with %v", err)
			}
			c.ended(t, len(tc.messages)-1, clientLeft)
		})
	}
}

func TestHealth(t *testing.T) {
	server, gateways, probes := serve(t, &chooser{})
	plain, err := grpc.NewClient("dns:///"+probes, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	connections := map[string]*grpc.ClientConn{"gateways": gatewaytest.Dial(t, gateways), "probes": plain}
	check := func(when string, ready healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for port, connection := range connections {
			for service, want := range map[string]healthpb.HealthCheckResponse_ServingStatus{
				"liveness": healthpb.HealthCheckResponse_SERVING, "readiness": ready, "envoy.service.ext_proc.v3.ExternalProcessor": ready,
			} {
				got, err := healthpb.NewHealthClient(connection).Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
				if err != nil || got.GetStatus() != want {
					t.Errorf("%s, port for %s: %s is %v, %v; want %v", when, port, service, got.GetStatus(), err, want)
				}
			}
		}
	}
	check("at first", healthpb.HealthCheckResponse_NOT_SERVING)
	server.SetReady(true)
	check("ready", healthpb.HealthCheckResponse_SERVING)
	server.SetReady(false)
	check("draining", healthpb.HealthCheckResponse_NOT_SERVING)
}

// TestShutdown checks that a running stream may finish after Shutdown, and is aborted if it takes too long.
func TestShutdown(t *testing.T) {
	for _, finishes := range []bool{true, false} {
		t.Run(fmt.Sprint("finishes ", finishes), func(t *testing.T) {
			c := &chooser{}
			server, address, _ := serve(t, c)
			s := gatewaytest.Open(t, gatewaytest.Dial(t, address), gatewaytest.FullDuplex)
			s.RequestHeaders("GET", "/", nil, true, nil)
			s.Picked()
			drain, stop := context.WithCancel(t.Context())
			defer stop()
			ended := make(chan error, 1)
			go func() { ended <- server.Shutdown(drain) }()
			if !finishes {
				stop()
				if err := <-ended; !errors.Is(err, context.Canceled) {
					t.Errorf("Shutdown ended with %v", err)
				}
				c.ended(t, 1, clientLeft)
				return
			}
			s.ResponseHeaders(200, nil, true, "")
			s.Answered()
			if err := s.End(); err != io.EOF {
				t.Error(err)
			}
			if err := <-ended; err != nil {
				t.Errorf("Shutdown ended with %v", err)
			}
			c.ended(t, 1, 200)
		})
	}
}

// BenchmarkExchange measures one request of 4 KB and a response of 20 events over TLS, including both sides of the
// protocol.
func BenchmarkExchange(b *testing.B) {
	config, err := TLSConfig("", "", "")
	if err != nil {
		b.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	probes, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	server := NewServer(&chooser{}, Options{TLS: config, MaxBodyBytes: maxBody})
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener, probes) }()
	defer func() {
		if err := server.Shutdown(context.Background()); err != nil {
			b.Error(err)
		}
		<-ended
	}()
	connection := gatewaytest.Dial(b, listener.Addr().String())
	body := randomBytes(4096)
	event := []byte("data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n")
	b.ReportAllocs()
	for b.Loop() {
		s := gatewaytest.Open(b, connection, gatewaytest.FullDuplex)
		s.RequestHeaders("POST", "/v1/completions", nil, false, nil)
		s.RequestBody(body, len(body), true)
		s.Picked()
		s.Body(-1)
		s.ResponseHeaders(200, map[string]string{"content-type": "text/event-stream"}, false, "10.0.0.1:8000")
		s.Answered()
		for i := range 20 {
			s.ResponseBody(event, len(event), i == 19)
			s.Body(len(event))
		}
		if err := s.End(); err != io.EOF {
			b.Fatal(err)
		}
	}
	connection.Close()
}

// TestShutdownBeforeServe checks that a server that is shut down before it serves ends without an error.
func TestShutdownBeforeServe(t *testing.T) {
	config, err := TLSConfig("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	var listeners [2]net.Listener
	for i := range listeners {
		if listeners[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	server := NewServer(&chooser{}, Options{TLS: config, MaxBodyBytes: maxBody})
	if err := server.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := server.Serve(listeners[0], listeners[1]); err != nil {
		t.Errorf("the server ended with %v", err)
	}
}
