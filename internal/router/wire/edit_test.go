// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestCutMembers(t *testing.T) {
	cases := map[string]struct {
		data  string
		path  []string
		value string // empty: not found
		rest  string
	}{
		"first":                     {`{"a":1, "b":2}`, []string{"a"}, `1`, `{ "b":2}`},
		"middle":                    {`{"a":1, "b":2, "c":3}`, []string{"b"}, `2`, `{"a":1,  "c":3}`},
		"last":                      {`{"a":1, "b":[2, {"b":0}] }`, []string{"b"}, `[2, {"b":0}]`, `{"a":1 }`},
		"only":                      {`{ "a" : "x" }`, []string{"a"}, `"x"`, `{  }`},
		"nested":                    {`{"m":{"a":1,"r":"x","b":2},"c":3}`, []string{"m", "r"}, `"x"`, `{"m":{"a":1,"b":2},"c":3}`},
		"nested, only member":       {`{"a":1,"m":{"r":"x"},"c":3}`, []string{"m", "r"}, `"x"`, `{"a":1,"c":3}`},
		"nested, only members":      {`{"m":{"r":"x"}}`, []string{"m", "r"}, `"x"`, `{}`},
		"name as a value":           {`{"b":"a","a":"b"}`, []string{"a"}, `"b"`, `{"b":"a"}`},
		"escaped and unicode":       {`{"k\"":"é,","a":"},","z":0}`, []string{"a"}, `"},"`, `{"k\"":"é,","z":0}`},
		"absent":                    {`{"a":1}`, []string{"b"}, ``, `{"a":1}`},
		"absent below":              {`{"m":{"a":1}}`, []string{"m", "r"}, ``, `{"m":{"a":1}}`},
		"below what is no map":      {`{"m":1}`, []string{"m", "r"}, ``, `{"m":1}`},
		"in an array":               {`{"c":[{"i":0,"r":"x"}, {"r":"y","i":1}],"u":1}`, []string{"c", "r"}, `"x" "y"`, `{"c":[{"i":0}, {"i":1}],"u":1}`},
		"in some elements":          {`{"c":[{"i":0},7,{"e":{"r":"y"},"i":1}]}`, []string{"c", "e", "r"}, `"y"`, `{"c":[{"i":0},7,{"i":1}]}`},
		"only member of an element": {`{"c":[{"r":"x"}]}`, []string{"c", "r"}, `"x"`, `{"c":[{}]}`},
		"a batch":                   {` [ {"m":{"r":"x","a":1}} , {"m":{"r":"y"}} ]`, []string{"m", "r"}, `"x" "y"`, ` [ {"m":{"a":1}} , {} ]`},
		"an array without it":       {`[1,[2],"a"]`, []string{"a"}, ``, `[1,[2],"a"]`},
		"a broken array":            {`[{"a":1}`, []string{"a"}, ``, `[{"a":1}`},
		"not an object":             {`"a"`, []string{"a"}, ``, `"a"`},
		"not JSON":                  {`{"a":1`, []string{"a"}, ``, `{"a":1`},
		"broken after it":           {`{"a":1,"b":}`, []string{"a"}, ``, `{"a":1,"b":}`},
		"empty":                     {``, []string{"a"}, ``, ``},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			values, rest := CutMembers([]byte(tc.data), tc.path)
			var texts []string
			for _, value := range values {
				texts = append(texts, string(value))
			}
			if got := strings.Join(texts, " "); got != tc.value || string(rest) != tc.rest {
				t.Errorf("values %s, rest %s; want values %s, rest %s", got, rest, tc.value, tc.rest)
			}
		})
	}
}

func TestNullMembers(t *testing.T) {
	for name, tc := range map[string]struct{ data, rest string }{
		"alone":        {`{"c":[{"r":[1,2]}]}`, `{"c":[{"r":null}]}`},
		"in a list":    {`{"c":[{"i":0,"r":"x"}, {"r":{"a":1} ,"i":1},{"i":2}],"u":1}`, `{"c":[{"i":0,"r":null}, {"r":null ,"i":1},{"i":2}],"u":1}`},
		"null already": {`{"c":[{"r":null}]}`, `{"c":[{"r":null}]}`},
		"absent":       {`{"c":[{"i":0}]}`, `{"c":[{"i":0}]}`},
		"not JSON":     {`{"c":[{"r":1}`, `{"c":[{"r":1}`},
	} {
		if _, rest := NullMembers([]byte(tc.data), []string{"c", "r"}); string(rest) != tc.rest {
			t.Errorf("%s: %s, want %s", name, rest, tc.rest)
		}
	}
}

// FuzzCutMembers checks for arbitrary objects that the result is the object without the member.
func FuzzCutMembers(f *testing.F) {
	f.Add(`{"a":1,"b":[1,2],"c":{"a":null}}`, "b")
	f.Add(`{"a":1}`, "a")
	f.Add("{ \"a\" :\n1 ,\t\"b\": 2 }", "b")
	f.Add(`{"b":[{"b":1},{"b":2,"a":[]}]}`, "b")
	f.Add(`[{"b":1}, [ {"b":[]} ]]`, "b")
	f.Fuzz(func(t *testing.T, data, name string) {
		values, rest := CutMembers([]byte(data), []string{name})
		if !json.Valid([]byte(data)) {
			return // a streaming decoder may accept data after an object; the engine sends complete ones
		}
		if values == nil {
			if string(rest) != data {
				t.Fatalf("%q became %q", data, rest)
			}
			return
		}
		if !json.Valid(rest) {
			t.Fatalf("%q without %q is %q", data, name, rest)
		}
		for _, value := range values {
			if !json.Valid(value) {
				t.Fatalf("a value of %q in %q is %q", name, data, value)
			}
		}
		var before, after map[string]json.RawMessage
		if json.Unmarshal([]byte(data), &before) != nil || json.Unmarshal(rest, &after) != nil {
			return // an array
		}
		if _, still := after[name]; !still && len(before) != len(after)+1 {
			t.Fatalf("%q without %q is %q", data, name, rest)
		}
	})
}

// TestOnly checks that a body without most of its members has the same text and the same last value of the others.
func TestOnly(t *testing.T) {
	text := `{"a":1,"b":2,"a":3,"c":4}`
	b := ParseBody([]byte(text)).Only([]string{"a", "x"})
	if len(b.members) != 1 || string(b.get("a")) != "3" || b.Has("b") || !b.IsObject() {
		t.Errorf("%d members, a is %s", len(b.members), b.get("a"))
	}
	if head, rest := b.With(Addition{"r", "3"}); head+string(rest) != `{"r":3,"a":1,"b":2,"a":3,"c":4}` {
		t.Errorf("got %s%s", head, rest)
	}
	none := ParseBody([]byte(`{"b":2}`)).Only(nil)
	if head, rest := none.With(Addition{"r", "3"}); head+string(rest) != `{"r":3,"b":2}` {
		t.Errorf("got %s%s", head, rest)
	}
}

// TestWithSeveral checks that members are added in order to an object only.
func TestWithSeveral(t *testing.T) {
	for body, want := range map[string]string{
		` {"prompt":"x"}`: `{"r":3,"f":true,"prompt":"x"}`, `{}`: `{"r":3,"f":true}`, `null`: `null`, `[]`: `[]`, ``: ``, `{"prompt"`: `{"prompt"`,
	} {
		b := ParseBody([]byte(body))
		if head, rest := b.With(Addition{"r", "3"}, Addition{"f", "true"}); head+string(rest) != want {
			t.Errorf("%s becomes %s%s, want %s", body, head, rest, want)
		}
		if head, rest := b.With(); head != "" || string(rest) != body {
			t.Errorf("%s without additions becomes %s%s", body, head, rest)
		}
	}
}

func TestRequestsAny(t *testing.T) {
	for body, want := range map[string]bool{
		`{"r":true}`: true, `{"r":1}`: true, `{"r":false}`: false, `{"r":null}`: false, `{"R":true}`: false, `{"p":"r"}`: false,
		`{"r":false,"r":true}`: true, `{"\u0072":true}`: true, `{"r":true,"temperature":NaN}`: true, `{"temperature":NaN}`: true, `{`: false, ``: false,
	} {
		if got := ParseBody([]byte(body)).RequestsAny([]string{"other", "r"}); got != want {
			t.Errorf("%s: %v, want %v", body, got, want)
		}
	}
	if ParseBody([]byte("x")).RequestsAny(nil) {
		t.Error("a body that is no object requests something")
	}
}
