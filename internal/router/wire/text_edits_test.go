// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
)

// upperCase converts texts to upper case. It returns an error at the end of a text with an exclamation mark.
type upperCase struct{ refused bool }

var errExclaims = errors.New("it exclaims")

func (u *upperCase) Edit(dst, piece []byte) ([]byte, error) {
	u.refused = u.refused || bytes.Contains(piece, []byte("!"))
	return append(dst, bytes.ToUpper(piece)...), nil
}

func (u *upperCase) End(dst []byte) ([]byte, error) {
	if u.refused {
		return dst, errExclaims
	}
	return dst, nil
}

// editTexts edits the strings at a/b and c of a response that arrives byte by byte or in one piece.
func editTexts(data, kind string, slowly bool) (string, error) {
	var from io.Reader = strings.NewReader(data)
	if slowly {
		from = iotest.OneByteReader(from)
	}
	response := &http.Response{Header: http.Header{"Content-Type": {kind}}, Body: io.NopCloser(from)}
	if err := EditTexts(response, [][]string{{"a", "b"}, {"c"}}, func() (TextEditor, error) { return &upperCase{}, nil }); err != nil {
		return "", err
	}
	got, err := io.ReadAll(response.Body)
	return string(got), err
}

func TestEditTexts(t *testing.T) {
	for name, tc := range map[string]struct{ data, want string }{
		"a member":                 {` { "c" : "x", "b":"x" } `, ` { "c" : "X", "b":"x" } `},
		"deeper":                   {`{"a":{"k":1, "b": "x","c":"x"},"b":"x","c":"x"}`, `{"a":{"k":1, "b": "X","c":"x"},"b":"x","c":"X"}`},
		"absent":                   {`{"b":"x"}`, `{"b":"x"}`},
		"absent below":             {`{"a":{"c":"x"}}`, `{"a":{"c":"x"}}`},
		"no object below":          {`{"a":"b"}`, `{"a":"b"}`},
		"null":                     {`{"c":null,"a":{"b":null}}`, `{"c":null,"a":{"b":null}}`},
		"behind other values":      {`{"x":[1,{"c":"x"},[]],"y":{},"z":-1.5e3,"t":true,"c":"x"}`, `{"x":[1,{"c":"x"},[]],"y":{},"z":-1.5e3,"t":true,"c":"X"}`},
		"a batch":                  {` [{"c":"x"} , {"b":"x"},{"c":"y"}]` + "\n", ` [{"c":"X"} , {"b":"x"},{"c":"Y"}]` + "\n"},
		"an array on the way":      {`{"a":[{"b":"x"},{"b":"y"}]}`, `{"a":[{"b":"X"},{"b":"Y"}]}`},
		"an array at the end":      {`{"c":["x",null,["y"]]}`, `{"c":["X",null,["Y"]]}`},
		"twice":                    {`{"c":"x","c":"y"}`, `{"c":"X","c":"Y"}`},
		"an empty one":             {`{"c":""}`, `{"c":""}`},
		"names as texts":           {`{"b":"c","a":"\"c\":\"x\"","c":"x"}`, `{"b":"c","a":"\"c\":\"x\"","c":"X"}`},
		"escapes in a key":         {`{"\u0063":"x","\"c":"x","c\\":"x"}`, `{"\u0063":"X","\"c":"x","c\\":"x"}`},
		"escaped slashes":          {`{"c":"x\/y\/","d":1}`, `{"c":"X/Y/"  ,"d":1}`},
		"a long key":               {`{"` + strings.Repeat("c", 1000) + `":"x","c":"x"}`, `{"` + strings.Repeat("c", 1000) + `":"x","c":"X"}`},
		"a long text":              {`{"c":"` + strings.Repeat("x", 200_000) + `"}`, `{"c":"` + strings.Repeat("X", 200_000) + `"}`},
		"longer than what is held": {`{"x":"` + strings.Repeat("x", 200_000) + `","c":"x"}`, `{"x":"` + strings.Repeat("x", 200_000) + `","c":"X"}`},
		"an empty array":           {`[ ]`, `[ ]`},
		"no JSON":                  {`]}]{"a":]}} "x" :{{,"":[`, `]}]{"a":]}} "x" :{{,"":[`},
		"no JSON, with strings":    {`{}"x"}:"y","z"`, `{}"x"}:"y","z"`},
		"nothing":                  {``, ``},
	} {
		t.Run(name, func(t *testing.T) {
			for _, slowly := range []bool{false, true} {
				if got, err := editTexts(tc.data, "application/json", slowly); got != tc.want || err != nil {
					t.Errorf("%.300q, %v; want %.300q", got, err, tc.want)
				}
			}
		})
	}
	for name, data := range map[string]string{
		"a number": `{"c":1}`, "an object": `{"a":[{"b":{}}]}`, "numbers": `{"c":[[0,1]]}`, "true": `{"c":true}`, "refused": `{"c":"x!"}`,
		"an escape": `{"c":"x\n"}`, "an escape of a plain character": `{"c":"x\u002b"}`, "cut off": `{"c":"x`,
	} {
		for _, slowly := range []bool{false, true} {
			if got, err := editTexts(data, "application/json", slowly); err == nil || got != "" {
				t.Errorf("%s: %q, %v", name, got, err)
			}
		}
	}
}

// TestEditTextsOfEvents checks that each event is a separate text, and that events before an invalid one are forwarded.
func TestEditTextsOfEvents(t *testing.T) {
	const kind = "text/event-stream; charset=utf-8"
	for data, want := range map[string]string{
		"data: {\"c\":\"x\"}\n\ndata:{\"c\":\"y\"}\r\n\r\ndata: [DONE]\n\n":         "data: {\"c\":\"X\"}\n\ndata:{\"c\":\"Y\"}\r\n\r\ndata: [DONE]\n\n",
		": {\"c\":\"x\"}\nevent: {\"c\":\"x\"}\ndat\ndata:{\"c\":\"x\"}":            ": {\"c\":\"x\"}\nevent: {\"c\":\"x\"}\ndat\ndata:{\"c\":\"X\"}",
		"data: {\"a\":{\n\ndata: {\"b\":\"x\"}\n\ndata: \"\n\ndata:{\"c\":\"x\"}\n": "data: {\"a\":{\n\ndata: {\"b\":\"x\"}\n\ndata: \"\n\ndata:{\"c\":\"X\"}\n",
		"\n\n": "\n\n", "": "",
	} {
		for _, slowly := range []bool{false, true} {
			if got, err := editTexts(data, kind, slowly); got != want || err != nil {
				t.Errorf("%q, %v; want %q", got, err, want)
			}
		}
	}
	for _, bad := range []string{"data: {\"c\":\"x!\"}\n\n", "data: {\"c\":1}\n\n", "data: {\"c\":\"x\n\n", "data: {\"c\":\"x"} {
		for _, slowly := range []bool{false, true} {
			data := "data: {\"c\":\"x\"}\n\n" + bad
			if strings.HasSuffix(bad, "\n") {
				data += "data: {\"c\":\"y\"}\n\n"
			}
			got, err := editTexts(data, kind, slowly)
			if err == nil || !strings.HasPrefix(got, "data: {\"c\":\"X\"}\n\n") || strings.Contains(got, "Y") {
				t.Errorf("%q, %v", got, err)
			}
		}
	}
}

// FuzzEditTexts checks that arbitrary input keeps its length, and that input without such a path stays unchanged.
func FuzzEditTexts(f *testing.F) {
	f.Add([]byte(`{"a":[{"b":"x"}],"c":"y\/"}`), 3)
	f.Add([]byte(`{}"x"}:"y","z"`), 1)
	f.Fuzz(func(t *testing.T, data []byte, size int) {
		texts := &textEdits{paths: [][]string{{"a", "b"}, {"c"}}, edit: func() (TextEditor, error) { return &upperCase{}, nil }}
		var got []byte
		for rest := data; len(rest) > 0; {
			n := min(len(rest), max(1, size))
			var err error
			if got, err = texts.pass(got, rest[:n]); err != nil {
				return
			}
			rest = rest[n:]
		}
		if texts.at != inEdited && len(got) != len(data) && isASCII(data) {
			t.Fatalf("%d bytes became %d", len(data), len(got))
		}
		if !bytes.ContainsAny(data, `bc\`) && !bytes.Equal(got, data) {
			t.Fatalf("%q became %q", data, got)
		}
	})
}

// isASCII reports whether all characters are ASCII, so that upper case has the same length.
func isASCII(data []byte) bool {
	for _, c := range data {
		if c >= 0x80 {
			return false
		}
	}
	return true
}
