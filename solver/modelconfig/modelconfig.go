// Package modelconfig reads texts of config.json as they are found: as Python writes them, and with the language model inside of a
// multimodal wrapper.
package modelconfig

import (
	"bytes"
	"encoding/json"
	"regexp"
)

// notNumbers are the strings of a JSON text, and the names outside of them that Python's json writes for what JSON has no number.
var notNumbers = regexp.MustCompile(`(?s)"(?:[^"\\]|\\.)*"|-?Infinity|NaN`)

// Strict is a text with null in place of NaN, Infinity and -Infinity: JSON has none of them, and Python's json writes all three.
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

// wrappers are the members that hold the language model's configuration, or that of a wrapper around it: of most models, of InternVL, of
// DeepSeek-VL2, and of Qwen-Omni, whose thinker_config has a text_config.
var wrappers = []string{"text_config", "llm_config", "language_config", "thinker_config"}

// Inner is the member of a strict text that holds the language model's configuration, and its name; nil where there is none.
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
