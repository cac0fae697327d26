// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/engine"
)

func TestExternalExperts(t *testing.T) {
	for args, refused := range map[string]bool{
		"--enable-lora":                                                             true,
		"--lora-paths a=/adapters/a":                                                true,
		"--lora-paths=/adapters/a":                                                  true,
		"--lora-modules sql=/adapters/b":                                            true,
		"--lora_modules sql=/adapters/b":                                            true,
		"--default-mm-loras {}":                                                     true,
		"--enable-lora=true":                                                        true,
		"--kt-weight-path /experts":                                                 true,
		"--kt-weight /experts":                                                      true,
		"--kt-amx-weight-path /experts":                                             true,
		"--enable-lora --lora-target-modules q_proj k_proj --tp 4":                  false,
		"--enable-lora --lora-target-modules=q_proj,o_proj":                         false,
		"--enable-lora --lora-target-modules q_proj down_proj":                      true,
		"--enable-lora --lora-target-modules all":                                   true,
		"--enable-lora --lora-target-modules":                                       true,
		"--disable-lora":                                                            false,
		"--no-enable-lora":                                                          false,
		"--enable-lora=false":                                                       false,
		"--moe-a2a-backend deepep --load-format auto":                               false,
		"--served-model-name lora-expert":                                           false,
		"--chat-template /templates/explorations.jinja":                             false,
		`--hf-overrides {"ignore":["model.layers.1.mlp.experts.3"]}`:                true,
		`--hf-overrides={"ignore":["re:.*experts\\.3\\..*"]}`:                       true,
		`--json-model-override-args {"num_experts":128,"hot_expert":[5,7]}`:         true,
		`--served-model-name mixtral-8-experts-2`:                                   false,
		`--json-model-override-args {"num_experts":64,"rope_scaling":{"factor":4}}`: false,
		`--speculative-config {"method":"mtp","num_speculative_tokens":1}`:          false,
		`--hf-overrides {"num_experts_per_tok":4}`:                                  false,
	} {
		if err := engine.CheckExternalExperts(strings.Fields(args)); (err != nil) != refused {
			t.Errorf("%s: %v", args, err)
		} else if refused && !strings.Contains(err.Error(), "is invalid with ReshuffledWeights") {
			t.Errorf("%s: %v", args, err)
		}
	}
}
