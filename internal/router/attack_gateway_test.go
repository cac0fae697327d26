// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"encoding/binary"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/protobuf/proto"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// gatewayMessages returns messages of a gateway as gRPC sends them.
func gatewayMessages(messages ...*extprocv3.ProcessingRequest) (data []byte) {
	for _, message := range messages {
		text, err := proto.Marshal(message)
		if err != nil {
			panic(err) // a message of this file
		}
		data = append(binary.BigEndian.AppendUint32(append(data, 0), uint32(len(text))), text...)
	}
	return data
}

func gatewayHeader(end bool, fields ...string) *extprocv3.HttpHeaders {
	header := &corev3.HeaderMap{}
	for i := 0; i < len(fields); i += 2 {
		header.Headers = append(header.Headers, &corev3.HeaderValue{Key: fields[i], RawValue: []byte(fields[i+1])})
	}
	return &extprocv3.HttpHeaders{Headers: header, EndOfStream: end}
}

// gatewayRequest returns a request without a body.
func gatewayRequest() []byte {
	return gatewayMessages(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: gatewayHeader(true, ":method", http.MethodGet, ":path", "/v1/models"),
	}})
}

// gatewayPost returns a request with a body of this size in one message.
func gatewayPost(size int, config *extprocv3.ProtocolConfiguration) []byte {
	body := `{"prompt":"` + strings.Repeat("a", size) + `"}`
	return gatewayMessages(
		&extprocv3.ProcessingRequest{ProtocolConfig: config, Request: &extprocv3.ProcessingRequest_RequestHeaders{
			RequestHeaders: gatewayHeader(false, ":method", http.MethodPost, ":path", "/v1/completions"),
		}},
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte(body), EndOfStream: true}}},
	)
}

// gatewayAnswer returns a request and a response with a body of this size in one message.
func gatewayAnswer(size int) []byte {
	return append(gatewayRequest(), gatewayMessages(
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: gatewayHeader(false, ":status", "200")}},
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: make([]byte, size)}}},
	)...)
}

// unreadWindow is sufficient for the header of an answer. A gateway with this window reads nothing else.
const unreadWindow = 2000

// unread opens streams that send messages, read unreadWindow bytes of the answers, and stay open. The messages are made in
// the attacking process only.
func unread(connections, streams int, messagesOf func() []byte) attack {
	return func(ctx context.Context, t *testing.T, to attacked, reached func()) {
		messages := messagesOf()
		parallel(connections, reached, func(_ int, reached func()) {
			connection, framer, err := rawHTTP2(ctx, to.Gateways)
			if err != nil {
				return
			}
			defer connection.Close()
			defer context.AfterFunc(ctx, func() { connection.Close() })()
			if framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: unreadWindow}) != nil {
				return
			}
			sender := newWindows(framer)
			go sender.read(connection)
			for i := range streams {
				id := uint32(2*i + 1)
				if sender.open(id) != nil || sender.sendAll(ctx, id, messages) != nil {
					break
				}
			}
			reached()
			<-ctx.Done()
		})
	}
}
