// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/modelconfig"
)

// attentionModules lists the modules of attention that adapters change.
var attentionModules = []string{"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}

// externalWeights matches flags that load weights of experts or gates from outside of the checkpoint: LoRA adapters,
// and the experts that KTransformers keeps on CPUs. Engines apply these weights by the expert numbers of the model.
var externalWeights = regexp.MustCompile(`^--?(?:[a-z-]*-)?(?:loras?(?:-[a-z-]*)?|kt-(?:[a-z-]*weight-path|w[a-z-]*))$`)

// numberedExpert matches a module name, or a pattern, that contains an expert number.
var numberedExpert = regexp.MustCompile(`(?i)\bexperts?[.\\_\[(/]{1,4}\d`)

// namesExpert reports whether a value names an expert by its number, as an override of the model's configuration may
// do.
func namesExpert(value string) bool {
	const experts, layers = 1 << 16, 512 // upper bounds of known models: any small number may be an expert number
	return numberedExpert.MatchString(value) || strings.HasPrefix(value, "{") && json.Valid([]byte(value)) && modelconfig.CheckExpertEntries([]byte(value), experts, layers) != nil
}

// CheckExternalExperts returns an error if a user's argument refers to experts by their numbers in the model, because a
// permuted checkpoint numbers the experts differently. Adapters that change only modules of attention are allowed.
func CheckExternalExperts(args []string) error {
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		name, _, _ = strings.Cut(flagName(name), ".")
		switch {
		case !strings.HasPrefix(arg, "-"):
		case externalWeights.MatchString(name) && !isOff(name, value, joined) && !attentionOnly(args):
			return fmt.Errorf("%q is invalid with %s: the engine applies it by the expert numbers of the model, which a permuted checkpoint changes; use %s, restrict it to --lora-target-modules %s, or remove it",
				arg, ReshuffledWeights, EngineMap, strings.Join(attentionModules[:4], " "))
		case namesExpert(value):
			return fmt.Errorf("%.100q is invalid with %s: it names an expert by its number in the model, which a permuted checkpoint changes; use %s, or remove it", arg, ReshuffledWeights, EngineMap)
		case !joined && i+1 < len(args) && namesExpert(args[i+1]):
			return fmt.Errorf("%s %.100q is invalid with %s: it names an expert by its number in the model, which a permuted checkpoint changes; use %s, or remove it",
				arg, args[i+1], ReshuffledWeights, EngineMap)
		}
	}
	return nil
}

// isOff reports whether an argument disables a feature. --disable-lora is a flag of vLLM from 0.33.0.
func isOff(name, value string, joined bool) bool {
	return strings.HasPrefix(name, "--no-") || name == "--disable-lora" || joined && slices.Contains([]string{"false", "False", "0"}, value)
}

// attentionOnly reports whether the arguments restrict adapters to modules of attention.
func attentionOnly(args []string) bool {
	only := false
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		if flagName(name) != "--lora-target-modules" {
			continue
		}
		modules := strings.Split(value, ",")
		if !joined {
			modules = args[i+1:]
			if end := slices.IndexFunc(modules, func(arg string) bool { return strings.HasPrefix(arg, "-") }); end >= 0 {
				modules = modules[:end]
			}
		}
		for _, module := range modules {
			if !slices.Contains(attentionModules, module) {
				return false
			}
		}
		only = len(modules) > 0
	}
	return only
}
