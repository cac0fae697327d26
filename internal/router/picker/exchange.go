// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/client"
)

// Keys of the metadata with the endpoints of a request and with the endpoint that served it.
const (
	metadataNamespace = "envoy.lb"
	destinationKey    = "x-gateway-destination-endpoint"
	servedKey         = "x-gateway-destination-endpoint-served"
)

// clientLeft is the status code that proxies count for a client that disconnects before a response.
const clientLeft = 499

// exchange is the state of one stream: a request, then its response.
type exchange struct {
	stream  *stream
	picker  Picker
	maxBody int64
	memory  *httpserver.Memory
	// admitted is false if there are too many requests. arrived is called when this request is complete.
	admitted bool
	arrived  func()
	// header is the share of the memory budget for the request header.
	header *httpserver.Share
	// path is the path of the request without its query.
	path string
	// body is the request body until the response begins; nil if there is none.
	body *client.Body
	// requestMode and responseMode are the body modes of the gateway.
	requestMode, responseMode processingv3.ProcessingMode_BodySendMode
	// picked is nil before a pick, or if the gateway answers the request itself before a pick.
	picked  Exchange
	counted bool
}

// run executes the protocol until the gateway ends the stream.
func (x *exchange) run() error {
	defer x.close()
	first, err := x.stream.next()
	if err != nil {
		return ended(err)
	}
	if first.GetRequestHeaders() == nil {
		return status.Errorf(codes.InvalidArgument, "the first message is %T, not the request's header: processing_mode.request_header_mode must be SEND", first.GetRequest())
	}
	if err := x.configure(first.GetProtocolConfig()); err != nil {
		return err
	}
	if err = x.admit(); err == nil {
		err = x.request(first)
	}
	x.stream.limit, x.stream.holds = maxIdle, true
	if errors.Is(err, errBodyIncomplete) {
		err = nil // the following messages are the gateway's own response
	} else if err != nil {
		err = x.sendError(err)
	}
	for err == nil {
		var message *extprocv3.ProcessingRequest
		if message, err = x.stream.next(); err == nil {
			err = x.follow(message)
		}
	}
	return ended(err)
}

// admit counts the memory of a request in addition to its body, until the stream ends.
func (x *exchange) admit() error {
	if !x.admitted {
		return fmt.Errorf("%w: there are too many concurrent requests", client.ErrNoMemory)
	}
	if x.stream.received > maxHeaderMessage {
		return fmt.Errorf("%w: at most %d bytes are accepted", errHeaderTooLarge, maxHeaderMessage)
	}
	x.header = x.memory.Open(nil)
	if err := x.header.Finish(); err != nil {
		return err
	}
	return x.header.Take(streamBytes + 2*x.stream.received)
}

// ended returns the result of a stream. It is nil if the gateway has ended the stream at any point, or got an immediate
// response.
func ended(err error) error {
	if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, errImmediateResponse) {
		return nil
	}
	return err
}

// close releases the resources of the exchange. It counts the exchange if no response was sent.
func (x *exchange) close() {
	if x.picked != nil {
		x.picked.Release()
	}
	x.dropBody()
	if x.header != nil {
		x.header.Release()
	}
	x.count(clientLeft)
}

// dropBody releases the request body.
func (x *exchange) dropBody() {
	if x.body != nil {
		x.body.Drop()
	}
}

func (x *exchange) count(code int) {
	if !x.counted {
		x.counted = true
		x.picker.Count(code)
	}
}

// configure stores the body modes of the gateway. The default is the mode that the protocol requires.
func (x *exchange) configure(config *extprocv3.ProtocolConfiguration) error {
	x.requestMode, x.responseMode = processingv3.ProcessingMode_FULL_DUPLEX_STREAMED, processingv3.ProcessingMode_FULL_DUPLEX_STREAMED
	if config != nil {
		x.requestMode, x.responseMode = config.GetRequestBodyMode(), config.GetResponseBodyMode()
	}
	for name, mode := range map[string]processingv3.ProcessingMode_BodySendMode{"request": x.requestMode, "response": x.responseMode} {
		if mode == processingv3.ProcessingMode_GRPC {
			return status.Errorf(codes.Unimplemented, "processing_mode.%s_body_mode: %s is not supported: it must be FULL_DUPLEX_STREAMED", name, mode)
		}
	}
	return nil
}

// request handles a request up to its trailers.
func (x *exchange) request(first *extprocv3.ProcessingRequest) error {
	headers := first.GetRequestHeaders()
	header, pseudo := headerOf(headers.GetHeaders())
	x.path, _, _ = strings.Cut(pseudo[":path"], "?")
	r := &Request{
		Method: pseudo[":method"], Path: x.path, Header: header, Arrived: time.Now(),
		Subset:        subsetOf(first.GetMetadataContext()),
		ResponseFixed: x.responseMode != processingv3.ProcessingMode_FULL_DUPLEX_STREAMED && x.responseMode != processingv3.ProcessingMode_BUFFERED,
	}
	length, err := strconv.ParseInt(header.Get("Content-Length"), 10, 64)
	switch {
	case err != nil:
		length = -1
	case length > x.maxBody:
		return x.tooLarge()
	}
	if headers.GetEndOfStream() {
		return x.answerHeaders(r)
	}
	switch x.requestMode {
	case processingv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		return x.requestInChunks(r, length)
	case processingv3.ProcessingMode_BUFFERED, processingv3.ProcessingMode_BUFFERED_PARTIAL:
		return x.requestInOne(r)
	}
	// The gateway does not send the body, or sends it only after the pick.
	r.BodyFixed = true
	return x.answerHeaders(r)
}

func (x *exchange) tooLarge() error {
	return fmt.Errorf("%w: at most %d bytes are accepted", errBodyTooLarge, x.maxBody)
}

// pick picks an endpoint.
func (x *exchange) pick(r *Request) (Decision, error) {
	x.arrived()
	picked, err := x.picker.Pick(x.stream.Context(), r)
	if err != nil {
		return Decision{}, err
	}
	x.picked = picked
	return picked.Decision(), nil
}

// answerHeaders picks an endpoint from the header only.
func (x *exchange) answerHeaders(r *Request) error {
	decision, err := x.pick(r)
	if err != nil {
		return err
	}
	return x.stream.Send(requestHeaders(decision, r))
}

// requestInChunks delays the answer to the header until the body is complete and an endpoint was picked. length is the
// declared length of the body.
func (x *exchange) requestInChunks(r *Request, length int64) error {
	source := &bodyReader{stream: x.stream, of: ofRequest}
	body, err := client.Read(x.memory, source, length, x.maxBody, x.stream.interrupt(x.stream.control.SetReadDeadline))
	if err != nil {
		return err
	}
	x.body = body
	if int64(len(body.Bytes())) > x.maxBody {
		return x.tooLarge()
	}
	r.Body = body.Bytes()
	decision, err := x.pick(r)
	if err != nil {
		return err
	}
	if err := x.stream.Send(requestHeaders(decision, r)); err != nil {
		return err
	}
	sink := &bodyWriter{stream: x.stream, of: ofRequest}
	for _, part := range [][]byte{[]byte(decision.Head), decision.Body} {
		if _, err := sink.Write(part); err != nil {
			return err
		}
	}
	return sink.end(source.trailers)
}

// requestInOne lets the gateway hold the header. The gateway applies the header changes that are sent with the body.
func (x *exchange) requestInOne(r *Request) error {
	if err := x.stream.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}}}); err != nil {
		return err
	}
	message, err := x.stream.nextRequired()
	if err != nil {
		return err
	}
	body := message.GetRequestBody()
	if body == nil {
		x.stream.unread(message)
		return errBodyIncomplete
	}
	if int64(len(body.GetBody())) > x.maxBody {
		return x.tooLarge()
	}
	if x.body, err = client.Keep(x.memory, body.GetBody()); err != nil {
		return err
	}
	// If the body exceeds the gateway's buffer, only its start is sent, which must not be changed.
	r.Body, r.BodyFixed = body.GetBody(), x.requestMode == processingv3.ProcessingMode_BUFFERED_PARTIAL
	decision, err := x.pick(r)
	if err != nil {
		return err
	}
	common := destination(decision, r)
	if changesBody(decision, r) {
		common.BodyMutation = wholeBody(slices.Concat([]byte(decision.Head), decision.Body))
	}
	answer := ofRequest.answer(common)
	answer.DynamicMetadata = metadata(decision)
	return x.stream.Send(answer)
}

// follow handles a message after the header and body of the request.
func (x *exchange) follow(message *extprocv3.ProcessingRequest) error {
	if answered, err := x.handleInterleaved(message); answered {
		return err
	}
	switch {
	case message.GetResponseHeaders() != nil:
		return x.response(message)
	case message.GetResponseBody() != nil && x.responseMode != processingv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		if message.GetResponseBody().GetEndOfStream() {
			x.release()
		}
		return x.stream.Send(ofResponse.answer(nil))
	case message.GetResponseTrailers() != nil:
		x.release()
		return x.stream.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocv3.TrailersResponse{}}})
	}
	return status.Errorf(codes.InvalidArgument, "unexpected message %T", message.GetRequest())
}

// handleInterleaved answers messages of the request that arrive during the response, and reports whether message was
// one.
func (x *exchange) handleInterleaved(message *extprocv3.ProcessingRequest) (answered bool, err error) {
	switch {
	case message.GetRequestTrailers() != nil:
		return true, x.stream.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocv3.TrailersResponse{}}})
	case message.GetRequestBody() == nil:
		return false, nil
	case x.requestMode != processingv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		return true, x.stream.Send(ofRequest.answer(nil))
	}
	return x.picked == nil, nil // the rest of a body that no endpoint receives
}

// release releases the endpoint at the end of the response, before the stream ends.
func (x *exchange) release() {
	if x.picked != nil {
		x.picked.Release()
	}
}

// response handles a response up to its trailers.
func (x *exchange) response(first *extprocv3.ProcessingRequest) error {
	headers := first.GetResponseHeaders()
	header, pseudo := headerOf(headers.GetHeaders())
	code, err := strconv.Atoi(pseudo[":status"])
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "response header :status: %q is invalid: it must be a number", pseudo[":status"])
	}
	x.count(code)
	x.dropBody()
	response := &http.Response{StatusCode: code, Header: header, Body: http.NoBody}
	served := first.GetMetadataContext().GetFilterMetadata()[metadataNamespace].GetFields()[servedKey].GetStringValue()
	switch {
	case headers.GetEndOfStream():
		defer x.release()
		return x.responseHeader(response, served)
	case x.responseMode == processingv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		return x.responseInChunks(response, served)
	case x.responseMode == processingv3.ProcessingMode_BUFFERED:
		return x.responseInOne(response, served)
	}
	return x.responseHeader(response, served)
}

// modify lets the Picker change a response, and returns the changes of the header.
func (x *exchange) modify(response *http.Response, served string) (*extprocv3.HeaderMutation, error) {
	if x.picked == nil {
		return nil, nil
	}
	before := response.Header.Clone()
	if err := x.picked.ModifyResponse(served, response); err != nil {
		return nil, err
	}
	return difference(before, response.Header), nil
}

// responseHeader answers the header of a response that has no body, or a body that cannot be changed.
func (x *exchange) responseHeader(response *http.Response, served string) error {
	mutation, err := x.modify(response, served)
	if err != nil {
		return x.sendError(err)
	}
	return x.stream.Send(responseHeaders(mutation))
}

// responseInChunks forwards a response as it arrives, as the Picker edits it.
func (x *exchange) responseInChunks(response *http.Response, served string) error {
	defer x.release()
	source := &bodyReader{stream: x.stream, of: ofResponse, handleInterleaved: x.handleInterleaved}
	response.Body = io.NopCloser(source)
	mutation, err := x.modify(response, served)
	if err != nil {
		return x.sendError(err)
	}
	if err := x.stream.Send(responseHeaders(mutation)); err != nil {
		return err
	}
	sink := &bodyWriter{stream: x.stream, of: ofResponse}
	source.beforeWait = sink.flush
	if _, err := io.Copy(sink, response.Body); err != nil {
		if source.err != nil && source.err != io.EOF {
			return source.err
		}
		return status.Errorf(codes.Internal, "failed to forward the response: %v", err)
	}
	return sink.end(source.trailers)
}

// responseInOne handles a response with a body in one message.
func (x *exchange) responseInOne(response *http.Response, served string) error {
	defer x.release()
	if err := x.stream.Send(responseHeaders(nil)); err != nil {
		return err
	}
	message, err := x.stream.nextRequired()
	if err != nil {
		return err
	}
	body := message.GetResponseBody()
	if body == nil { // trailers only
		x.stream.unread(message)
		return nil
	}
	response.Body = io.NopCloser(bytes.NewReader(body.GetBody()))
	mutation, err := x.modify(response, served)
	if err != nil {
		return x.sendError(err)
	}
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return x.sendError(err)
	}
	common := &extprocv3.CommonResponse{HeaderMutation: mutation}
	if !bytes.Equal(data, body.GetBody()) {
		common.BodyMutation = wholeBody(data)
	}
	return x.stream.Send(ofResponse.answer(common))
}

// requestHeaders answers the header of a request for which an endpoint was picked.
func requestHeaders(decision Decision, r *Request) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{
			RequestHeaders: &extprocv3.HeadersResponse{Response: destination(decision, r)},
		},
		DynamicMetadata: metadata(decision),
	}
}

func responseHeaders(mutation *extprocv3.HeaderMutation) *extprocv3.ProcessingResponse {
	answer := &extprocv3.HeadersResponse{}
	if mutation != nil {
		answer.Response = &extprocv3.CommonResponse{HeaderMutation: mutation}
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: answer}}
}

// destination sets the endpoints in the header and applies the header changes of the decision. It clears the route
// cache because the gateway chose the route from the old header.
func destination(decision Decision, r *Request) *extprocv3.CommonResponse {
	after := r.Header.Clone()
	for _, name := range decision.RemoveHeaders {
		after.Del(name)
	}
	for name, value := range decision.SetHeaders {
		after.Set(name, value)
	}
	if changesBody(decision, r) {
		after.Set("Content-Length", strconv.Itoa(len(decision.Head)+len(decision.Body)))
	}
	mutation := difference(r.Header, after)
	if mutation == nil {
		mutation = &extprocv3.HeaderMutation{}
	}
	// The header is set even if the client has sent the same value.
	mutation.SetHeaders = append(mutation.SetHeaders, setHeader(destinationKey, strings.Join(decision.Endpoints, ",")))
	return &extprocv3.CommonResponse{HeaderMutation: mutation, ClearRouteCache: true}
}

func changesBody(decision Decision, r *Request) bool {
	return !r.BodyFixed && (decision.Edited || decision.Head != "" || !bytes.Equal(decision.Body, r.Body))
}

// metadata returns the dynamic metadata with the endpoints for the gateway's load balancer.
func metadata(decision Decision) *structpb.Struct {
	return &structpb.Struct{Fields: map[string]*structpb.Value{
		metadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			destinationKey: structpb.NewStringValue(strings.Join(decision.Endpoints, ",")),
		}}),
	}}
}

// wholeBody replaces a buffered body.
func wholeBody(data []byte) *extprocv3.BodyMutation {
	if len(data) == 0 {
		return &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_ClearBody{ClearBody: true}}
	}
	return &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: data}}
}
