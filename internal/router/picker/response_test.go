// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// TestForwardsResponses checks that each chunk of a response is returned before the next one is sent, for any chunk
// size, and that the Picker gets the serving endpoint.
func TestForwardsResponses(t *testing.T) {
	for _, trailers := range []bool{false, true} {
		c := &chooser{modify: func(r *http.Response) error {
			r.Header.Set("X-Semmoe-Pod", "a")
			r.Header.Del("Server")
			return nil
		}}
		s := open(t, c, gatewaytest.FullDuplex)
		s.RequestHeaders("GET", "/v1/models", nil, true, nil)
		s.Picked()
		s.ResponseHeaders(201, map[string]string{"content-type": "text/event-stream", "server": "uvicorn"}, false, "10.0.0.2:8000")
		if change := s.Answered(); len(change.Set) != 1 || change.Set["x-semmoe-pod"] != "a" || len(change.Remove) != 1 || !change.Remove["server"] {
			t.Errorf("the header is changed by %v", change)
		}
		for _, n := range []int{1, 10, chunkBytes, 3*chunkBytes + 1} {
			chunk := randomBytes(n)
			s.ResponseBody(chunk, n, false)
			if got, ended := s.Body(n); !bytes.Equal(got, chunk) || ended {
				t.Fatalf("%d of %d bytes came back, ended %v", len(got), n, ended)
			}
		}
		if trailers {
			s.ResponseTrailers()
			if message := s.Receive(); message.GetResponseTrailers() == nil {
				t.Errorf("got %v, want the answer to the trailers", message)
			}
		} else {
			s.ResponseBody([]byte("end"), 10, true)
			if got, ended := s.Body(-1); string(got) != "end" || !ended {
				t.Errorf("%q came back, ended %v", got, ended)
			}
		}
		c.ended(t, 1, 201) // before the gateway ends the stream
		if err := s.End(); err != io.EOF {
			t.Error(err)
		}
		if !slices.Equal(c.served, []string{"10.0.0.2:8000"}) {
			t.Errorf("served by %v", c.served)
		}
	}
}

// upper is a body in upper case, which simulates a Picker that edits a response while it arrives.
type upper struct{ io.Reader }

func (u upper) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	copy(p, bytes.ToUpper(p[:n]))
	return n, err
}

func (upper) Close() error { return nil }

// TestForwardsReplacedResponses checks that a response that the Picker replaces is returned as soon as the Picker
// produces it: a stream as it arrives, and a buffered response at its end, with its length.
func TestForwardsReplacedResponses(t *testing.T) {
	t.Run("as it comes", func(t *testing.T) {
		c := &chooser{modify: func(r *http.Response) error { r.Body = upper{r.Body}; return nil }}
		s := open(t, c, gatewaytest.FullDuplex)
		s.RequestHeaders("GET", "/", nil, true, nil)
		s.Picked()
		s.ResponseHeaders(200, nil, false, "")
		s.Answered()
		for _, chunk := range []string{"a", "bc", strings.Repeat("d", 70_000)} {
			s.ResponseBody([]byte(chunk), len(chunk), false)
			if got, _ := s.Body(len(chunk)); string(got) != strings.ToUpper(chunk) {
				t.Fatalf("%.10q became %.10q", chunk, got)
			}
		}
		s.ResponseBody(nil, 1, true)
		if got, ended := s.Body(-1); len(got) != 0 || !ended {
			t.Errorf("%q came back, ended %v", got, ended)
		}
	})
	t.Run("as a whole", func(t *testing.T) {
		c := &chooser{modify: func(r *http.Response) error {
			data, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(data[:len(data)/2]))
			r.Header.Set("Content-Length", fmt.Sprint(len(data)/2))
			return err
		}}
		s := open(t, c, gatewaytest.FullDuplex)
		s.RequestHeaders("GET", "/", nil, true, nil)
		s.Picked()
		body := randomBytes(150_000)
		s.ResponseHeaders(200, map[string]string{"content-length": "150000"}, false, "")
		s.ResponseBody(body, 999, false)
		s.ResponseTrailers()
		if change := s.Answered(); change.Set["content-length"] != "75000" {
			t.Errorf("the header is changed by %v", change)
		}
		if got, ended := s.Body(75_000); !bytes.Equal(got, body[:75_000]) || ended {
			t.Errorf("%d bytes came back, ended %v", len(got), ended)
		}
		if message := s.Receive(); message.GetResponseTrailers() == nil {
			t.Errorf("got %v, want the answer to the trailers", message)
		}
	})
	t.Run("an error before anything was sent", func(t *testing.T) {
		c := &chooser{modify: func(*http.Response) error { return errors.New("unreadable") }}
		s := open(t, c, gatewaytest.FullDuplex)
		s.RequestHeaders("GET", "/", nil, true, nil)
		s.Picked()
		s.ResponseHeaders(200, nil, false, "")
		if code, _, _ := s.Refused(); code != 502 {
			t.Errorf("code %d", code)
		}
		c.ended(t, 1, 200)
	})
	t.Run("an error later", func(t *testing.T) {
		c := &chooser{modify: func(r *http.Response) error {
			r.Body = io.NopCloser(io.MultiReader(strings.NewReader("begun"), errorReader{}))
			return nil
		}}
		s := open(t, c, gatewaytest.FullDuplex)
		s.RequestHeaders("GET", "/", nil, true, nil)
		s.Picked()
		s.ResponseHeaders(200, nil, false, "")
		s.Answered()
		// The gateway must not mistake it for the end of the response.
		if _, err := s.Next(); status.Code(err) != codes.Internal {
			t.Errorf("the stream ended with %v", err)
		}
		c.ended(t, 1, 200)
	})
}

type errorReader struct{}

func (errorReader) Read([]byte) (int, error) { return 0, errors.New("unreadable") }
