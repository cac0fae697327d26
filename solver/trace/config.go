package trace

import (
	"encoding/json"

	"github.com/semmoe/operator/solver/modelconfig"
)

// TextConfig is the part of Config that tells of the language model's layers: Config itself, or what it has of the language model where
// that of a multimodal wrapper leaves num_hidden_layers to it. It is empty where Config is, and has null where Config has what is no
// JSON (see modelconfig.Strict).
func (m *Model) TextConfig() string {
	text := modelconfig.Strict([]byte(m.Config))
	for {
		var config struct {
			HiddenLayers *json.RawMessage `json:"num_hidden_layers"`
		}
		_, inner := modelconfig.Inner(text)
		if inner == nil || json.Unmarshal(text, &config) != nil || config.HiddenLayers != nil {
			return string(text)
		}
		text = inner
	}
}
