// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"strings"
	"testing"
	"time"

	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// TestBodiesThatTakeAllMemory checks that bodies are kept until a response begins, and that clients of a gateway are
// asked to retry while all request memory is in use.
func TestBodiesThatTakeAllMemory(t *testing.T) {
	gatewaytest.NoLeaks(t)
	for name, mode := range map[string]processingv3.ProcessingMode_BodySendMode{
		"in chunks": processingv3.ProcessingMode_FULL_DUPLEX_STREAMED, "in one piece": processingv3.ProcessingMode_BUFFERED,
	} {
		t.Run(name, func(t *testing.T) {
			config, err := TLSConfig("", "", "")
			if err != nil {
				t.Fatal(err)
			}
			bodies := &httpserver.Memory{Max: 150_000 + 2*streamBytes}
			c := &chooser{}
			_, address, _ := serveOptions(t, c, Options{TLS: config, MaxBodyBytes: maxBody, Memory: bodies})
			gateway := gatewaytest.Dial(t, address)
			begin := func() *gatewaytest.Stream {
				s := gatewaytest.Open(t, gateway, modes(mode, processingv3.ProcessingMode_NONE))
				s.RequestHeaders("POST", "/v1/completions", map[string]string{"content-length": "40000"}, false, nil)
				if mode == processingv3.ProcessingMode_BUFFERED {
					s.Next() //nolint:errcheck // the next response shows the result
				}
				s.RequestBody(make([]byte, 40_000), maxBody, true)
				return s
			}
			picked := func(s *gatewaytest.Stream) {
				if mode == processingv3.ProcessingMode_BUFFERED {
					s.PickedInOne()
				} else {
					s.Picked()
				}
			}
			first := begin()
			picked(first)
			if code, change, body := begin().Refused(); code != 429 || change.Set["retry-after"] != "1" || !strings.Contains(body, "no memory left") {
				t.Errorf("code %d, %v, %s", code, change, body)
			}
			if mode != processingv3.ProcessingMode_BUFFERED {
				first.Body(-1)
			}
			first.ResponseHeaders(200, nil, false, "")
			first.Answered()
			// The stream and the header count until the response has ended.
			if held := bodies.Held(); held >= 40_000 {
				t.Errorf("%d bytes are still counted although the response has begun", held)
			}
			first.Cancel()
			released := func() {
				t.Helper()
				for range 10_000 {
					if bodies.Held() == 0 {
						return
					}
					time.Sleep(time.Millisecond)
				}
				t.Errorf("%d bytes are counted for a request of a disconnected client", bodies.Held())
			}
			released()
			second := begin()
			picked(second)
			second.Cancel()
			released()
		})
	}
}
