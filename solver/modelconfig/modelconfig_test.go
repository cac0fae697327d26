// SPDX-License-Identifier: Apache-2.0

package modelconfig

import (
	"encoding/json"
	"testing"
)

func TestStrict(t *testing.T) {
	for text, want := range map[string]string{
		`{"time_step_limit":[0.0,Infinity],"a":-Infinity,"b":NaN}`: `{"time_step_limit":[0.0,null],"a":null,"b":null}`,
		`{"a":"NaN, \"Infinity","-Infinity":[NaN]}`:                `{"a":"NaN, \"Infinity","-Infinity":[null]}`,
		`{"a":"\\","b":NaN}`:                                       `{"a":"\\","b":null}`,
		"{\"a\":\"\xff\",\"b\":NaN}":                               "{\"a\":\"\xff\",\"b\":null}",
		`{"a":1}`:                                                  `{"a":1}`,
		``:                                                         ``,
	} {
		if got := string(Strict([]byte(text))); got != want {
			t.Errorf("%s becomes %s; want %s", text, got, want)
		}
	}
	// Python's number names in other positions remain invalid.
	for _, text := range []string{`{"a":1NaN}`, `{"a":-NaN}`, `{NaN:1}`, `{"a":Infinitys}`, `{"a:NaN}`} {
		if strict := Strict([]byte(text)); json.Valid(strict) {
			t.Errorf("%s becomes %s, which is valid", text, strict)
		}
	}
}

func TestInner(t *testing.T) {
	for text, want := range map[string][2]string{
		`{"text_config":{"a":1}}`:                               {"text_config", `{"a":1}`},
		`{"llm_config":{"a":1},"vision_config":{"a":2}}`:        {"llm_config", `{"a":1}`},
		`{"language_config":{"a":1}}`:                           {"language_config", `{"a":1}`},
		`{"thinker_config":{"text_config":{}}}`:                 {"thinker_config", `{"text_config":{}}`},
		`{"text_config":null,"language_config":{}}`:             {"language_config", `{}`},
		`{"text_config":"config.json","vision_config":{"a":2}}`: {},
		`[]`: {},
		``:   {},
	} {
		if name, config := Inner([]byte(text)); name != want[0] || string(config) != want[1] {
			t.Errorf("%s has %q, %s; want %q", text, name, config, want)
		}
	}
}
