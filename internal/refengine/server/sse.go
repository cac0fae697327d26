// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"encoding/json"
	"net/http"
)

// eventStream writes server-sent events.
type eventStream struct {
	w          http.ResponseWriter
	controller *http.ResponseController
}

// newEventStream sends the response header immediately, so that the client of a queued request knows that the request
// was accepted. From then on errors are events.
func newEventStream(w http.ResponseWriter) *eventStream {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	s := &eventStream{w: w, controller: http.NewResponseController(w)}
	_ = s.controller.Flush() // a disconnected client is detected by its context
	return s
}

// send writes one event and flushes it.
func (s *eventStream) send(value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return s.sendRaw(string(text))
}

func (s *eventStream) sendRaw(text string) error {
	if _, err := s.w.Write([]byte("data: " + text + "\n\n")); err != nil {
		return err
	}
	return s.controller.Flush()
}

// finish ends the stream with [DONE], or with an error event if the generation failed. It sends nothing to a
// disconnected client.
func (s *eventStream) finish(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		_ = s.send(map[string]any{"error": asAPIError(err)})
		return
	}
	_ = s.sendRaw("[DONE]")
}
