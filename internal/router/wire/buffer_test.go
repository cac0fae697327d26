// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
)

// room is the memory budget of one response.
type budget struct {
	most, held int64
	gaveUp     int
}

func (r *budget) Reserve(bytes int64) bool {
	if bytes > r.most {
		return false
	}
	r.held = max(r.held, bytes)
	return true
}

func (r *budget) GiveUp() { r.gaveUp++ }

func (r *budget) Release() { r.held = 0 }

// TestRewriteWithinBudget checks that a response is edited if the budget fits the bytes that arrive, regardless of the
// length that its header declares. If not, it is forwarded unchanged, and the memory is released.
func TestRewriteWithinBudget(t *testing.T) {
	const most = 300 << 10
	for name, tc := range map[string]struct {
		size   int
		length string
		edited bool
	}{
		"empty":                         {0, "", true},
		"short":                         {100, "100", true},
		"short, of unknown length":      {100, "", true},
		"one part":                      {200 << 10, strconv.Itoa(200 << 10), true},
		"some parts, of unknown length": {120 << 10, "", true},
		"more than the room":            {1 << 20, "", false},
		"more than declared":            {1 << 20, "10", false},
		"less than declared":            {10, strconv.Itoa(1 << 40), true},
	} {
		t.Run(name, func(t *testing.T) {
			body := strings.Repeat("0123456789", tc.size/10+1)[:tc.size]
			response := &http.Response{Header: http.Header{}, Body: io.NopCloser(iotest.HalfReader(strings.NewReader(body)))}
			if tc.length != "" {
				response.Header.Set("Content-Length", tc.length)
			}
			r, ended := &budget{most: most}, 0
			edit := func(data []byte, _ bool) ([]byte, error) { return append([]byte("edited "), data...), nil }
			if err := Rewrite(response, edit, func() { ended++ }, r); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(response.Body)
			want := body
			if tc.edited {
				want = "edited " + body
			}
			if err != nil || string(got) != want || (ended == 1) != tc.edited || (r.gaveUp == 0) != tc.edited {
				t.Errorf("%d bytes, %v, ended %d times, given up %d times; want %d bytes", len(got), err, ended, r.gaveUp, len(want))
			}
			if err := response.Body.Close(); err != nil || !tc.edited && r.held != 0 {
				t.Errorf("%d bytes are reserved for a forwarded response, %v", r.held, err)
			}
		})
	}
}

// TestRewriteOfABrokenResponse checks that a response that breaks off while it is buffered is an error, not a short
// response.
func TestRewriteOfABrokenResponse(t *testing.T) {
	broken := errors.New("broken")
	response := &http.Response{Header: http.Header{}, Body: io.NopCloser(io.MultiReader(strings.NewReader("begun"), iotest.ErrReader(broken)))}
	if err := Rewrite(response, nil, nil, &budget{most: 1 << 20}); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

// TestRewriteOfALineWithoutEnd checks that a line of a stream that exceeds the budget is forwarded unchanged, and so is
// the rest of the stream.
func TestRewriteOfALineWithoutEnd(t *testing.T) {
	long := "data: " + strings.Repeat("x", 1<<20)
	body := "data: 1\n\n" + long + "\n\ndata: 2\n\n"
	response := &http.Response{Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: io.NopCloser(strings.NewReader(body))}
	r := &budget{most: 200 << 10}
	edit := func(data []byte, _ bool) ([]byte, error) {
		return bytes.ToUpper(append([]byte(" edited"), data...)), nil
	}
	if err := Rewrite(response, edit, func() {}, r); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(response.Body)
	if want := "data: EDITED 1\n\n" + long + "\n\ndata: 2\n\n"; err != nil || string(got) != want || r.gaveUp != 1 || r.held != 0 {
		t.Errorf("%d bytes that begin with %.40q, %v; want %d; given up %d times, %d bytes are held", len(got), got, err, len(want), r.gaveUp, r.held)
	}
}
