// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"encoding/json"
)

// defaultGroups are the defaults of n_group in the code of a model type.
var defaultGroups = map[string]int{"deepseek_v3": 8, "deepseek_v32": 8}

// Groups returns the number of groups of consecutive experts that the model's gate selects before it selects experts:
// n_group of the model's config (see TextConfig), or the model type's default. Errors are *InvalidError, for example if
// the trace has no config.
func (m *Model) Groups() (int, error) {
	if m.Config == "" {
		return 0, invalidf("__metadata__: model_config is missing in the trace; it is required to determine the expert groups of the gate")
	}
	var config struct {
		Type   string `json:"model_type"`
		Groups *int   `json:"n_group"`
		// ExpertGroups is the spelling of Kimi Linear.
		ExpertGroups *int `json:"num_expert_group"`
	}
	if err := json.Unmarshal([]byte(m.TextConfig()), &config); err != nil {
		return 0, invalidf("__metadata__: model_config is not the JSON of a model configuration: %v", err)
	}
	switch count := cmp.Or(config.Groups, config.ExpertGroups); {
	case count == nil:
		return max(1, defaultGroups[m.Type], defaultGroups[config.Type]), nil
	case *count < 1 || m.Experts%*count != 0:
		return 0, invalidf("model_config: n_group is %d; it must divide the %d experts", *count, m.Experts)
	default:
		return *count, nil
	}
}
