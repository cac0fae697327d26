package trace

import (
	"encoding/json"
	"strings"
)

// TextConfig is the part of Config that tells of the language model's layers: Config itself, or its text_config where that of a
// multimodal wrapper leaves num_hidden_layers to it. It is empty where Config is.
func (m *Model) TextConfig() string {
	var config struct {
		HiddenLayers json.RawMessage `json:"num_hidden_layers"`
		Text         json.RawMessage `json:"text_config"`
	}
	isObject := json.Unmarshal([]byte(m.Config), &config) == nil && strings.HasPrefix(string(config.Text), "{")
	if len(config.HiddenLayers) > 0 || !isObject {
		return m.Config
	}
	return string(config.Text)
}
