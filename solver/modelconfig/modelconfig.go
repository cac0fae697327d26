// SPDX-License-Identifier: Apache-2.0

// Package modelconfig reads config.json files as they occur in practice: with Python's number syntax, and with the
// language model inside a multimodal wrapper.
package modelconfig

import (
	"bytes"
	"encoding/json"
	"regexp"
)

// notNumbers matches the strings of a JSON text, and the non-JSON number names outside of strings that Python's json
// module writes.
var notNumbers = regexp.MustCompile(`(?s)"(?:[^"\\]|\\.)*"|-?Infinity|NaN`)

// Strict returns the text with null in place of NaN, Infinity and -Infinity, which Python's json module writes and JSON
// does not allow.
func Strict(text []byte) []byte {
	if !bytes.Contains(text, []byte("NaN")) && !bytes.Contains(text, []byte("Infinity")) {
		return text
	}
	return notNumbers.ReplaceAllFunc(text, func(found []byte) []byte {
		if found[0] == '"' {
			return found
		}
		return []byte("null")
	})
}

// wrappers are the members that contain the language model's configuration or another wrapper: those of most models, of
// InternVL, of DeepSeek-VL2, and of Qwen-Omni, whose thinker_config contains a text_config.
var wrappers = []string{"text_config", "llm_config", "language_config", "thinker_config"}

// Inner returns the member of a strict text that contains the language model's configuration, and its name; nil if
// there is none.
func Inner(text []byte) (name string, config json.RawMessage) {
	var members map[string]json.RawMessage
	if json.Unmarshal(text, &members) != nil {
		return "", nil
	}
	for _, name := range wrappers {
		if bytes.HasPrefix(members[name], []byte("{")) {
			return name, members[name]
		}
	}
	return "", nil
}
