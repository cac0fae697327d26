// SPDX-License-Identifier: Apache-2.0

package jsonscan_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/router/jsonscan"
)

// texts are valid and invalid JSON texts.
var texts = []string{
	`{}`, ` { } `, `{"a":1}`, `{"a":1,"b":[1,2,{"c":null}],"d":{"e":true,"f":false}}`, `{"a":1,}`, `{"a"}`, `{"a":}`, `{a:1}`, `{"a":1`, `{"a":1}}`, `{"a":1} x`,
	`{"a":1,"a":2}`, "{\"\\u0061\":1}", `{"a":"\ud83d\ude00\ud800\u0041\udc00"}`, "{\"a\":\"\xff\xc3\"}", "{\"\xff\":1}", "{\"a\":\"\n\"}", `{"a":"\x"}`, `{"a":"\u12g4"}`,
	`{"a":"\u12`, `{"a":"\`, `{"a":"`, `[]`, `[ ]`, `[1,2]`, `[1,]`, `[1 2]`, `[`, `]`, `[[[]]]`, `["a",null,true,false,-0,0.5,1e9,1E-9,-12.5e+3]`,
	`[01]`, `[-]`, `[.5]`, `[1.]`, `[1e]`, `[+1]`, `[1e+]`, `[tru]`, `[nul]`, `"a"`, `1`, `null`, ``, ` `, "\t\r\n{\t\"a\"\r:\n1 ,\"b\":2 }", "{\"a\":\"12345678\x0112345678\"}",
	`{"a":"1234567","b":"12345678","c":"123456789\"\\\/\b\f\n\r\t"}`, "{\"a\":\"é\u00a0\x7f語\"}", "\ufeff{}",
	strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000), strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001),
	strings.Repeat(`{"a":`, 9_999) + "{}" + strings.Repeat("}", 9_999), strings.Repeat(`{"a":`, 10_000) + "{}" + strings.Repeat("}", 10_000),
}

// check compares the results for a text with encoding/json.
func check(data []byte) error {
	members, isObject := jsonscan.Object(data, nil)
	elements, isArray := jsonscan.Array(data, nil)
	var object map[string]json.RawMessage
	var array []json.RawMessage
	wantObject := json.Unmarshal(data, &object) == nil && object != nil
	wantArray := json.Unmarshal(data, &array) == nil && array != nil
	if isObject != wantObject || isArray != wantArray {
		return fmt.Errorf("object %v, array %v; want %v, %v", isObject, isArray, wantObject, wantArray)
	}
	if isArray {
		if len(elements) != len(array) {
			return fmt.Errorf("%d elements, want %d", len(elements), len(array))
		}
		for i, want := range array {
			if got := data[elements[i].Start:elements[i].End]; string(got) != string(want) {
				return fmt.Errorf("element %d is %s, want %s", i, got, want)
			}
			if err := checkString(want); err != nil {
				return err
			}
		}
	}
	if !isObject {
		return nil
	}
	names := map[string]bool{}
	for _, m := range members {
		names[string(m.Key)] = true
		if data[m.At] != '"' {
			return fmt.Errorf("key %q is not at %d", m.Key, m.At)
		}
	}
	if len(names) != len(object) {
		return fmt.Errorf("members %v, want %d", names, len(object))
	}
	for name, want := range object {
		if got := jsonscan.Get(data, members, name); string(got) != string(want) {
			return fmt.Errorf("member %q is %s, want %s", name, got, want)
		}
		if err := checkString(want); err != nil {
			return err
		}
	}
	return nil
}

func checkString(value []byte) error {
	var want *string
	isString := json.Unmarshal(value, &want) == nil && want != nil
	if got, ok := jsonscan.String(value); ok != isString || ok && got != *want {
		return fmt.Errorf("%s is decoded as %q, %v", value, got, ok)
	}
	return nil
}

func TestReadsAsEncodingJSON(t *testing.T) {
	for _, data := range texts {
		if err := check([]byte(data)); err != nil {
			t.Errorf("%.200q: %v", data, err)
		}
	}
	// Test every byte at every position of an eight-byte word, and after every escape.
	for at := range 20 {
		for b := range 256 {
			text := []byte(`{"a":"0123456789012345678901"}`)
			text[6+at] = byte(b)
			if err := check(text); err != nil {
				t.Fatalf("%q: %v", text, err)
			}
			text[5+at] = '\\'
			if err := check(text); err != nil {
				t.Fatalf("%q: %v", text, err)
			}
		}
	}
}

func TestGetWithoutMembers(t *testing.T) {
	if got := jsonscan.Get(nil, nil, "a"); got != nil {
		t.Errorf("got %s", got)
	}
}

func FuzzScan(f *testing.F) {
	for _, data := range texts {
		if len(data) < 1000 {
			f.Add([]byte(data))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := check(data); err != nil {
			t.Fatal(err)
		}
	})
}
