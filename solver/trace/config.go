// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"

	"github.com/semmoe/operator/solver/modelconfig"
)

// TextConfig returns the part of Config that describes the layers of the language model: Config itself, or the nested
// language model configuration if a multimodal wrapper does not set num_hidden_layers. It is empty if Config is empty,
// and contains null in place of values that are not valid JSON (see modelconfig.Strict).
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
