package engine

import (
	"fmt"
	"slices"
	"strings"
)

// Adapter is one engine's command line and HTTP surface.
type Adapter struct {
	// Command starts the engine in its stock image.
	Command []string
	// RankHeader pins a request to a data-parallel rank.
	RankHeader string
	// HealthPath answers 200 once the engine serves.
	HealthPath string
	// ExpertMapFile is the name, in a plan's ConfigMap, of the engine's expert map.
	ExpertMapFile string
	// RoutedExperts is how responses tell which experts their tokens activated.
	RoutedExperts RoutedExperts
	// Flags lists the flags that follow from a launch.
	Flags func(Launch) []Flag
}

// Launch is what an engine is started with.
type Launch struct {
	// ModelPath is the directory of the checkpoint in the engine's container.
	ModelPath string
	// ServedModelName is the name that clients send.
	ServedModelName string
	// Host and Port are where the engine listens.
	Host string
	Port int32
	// Ranks is the expert-parallel size: the number of devices of the replica.
	Ranks int32
	// RoutedExperts asks for an engine that can tell which experts a request's tokens activated.
	RoutedExperts bool
	// ExpertMap is the file that says which expert sits in which slot; empty for the engine's own placement.
	ExpertMap string
	// AttentionDP is true where each rank computes the attention of its own requests.
	AttentionDP bool
}

// RoutedExperts is how an engine is asked for the experts that a request's tokens activated, and how it answers.
type RoutedExperts struct {
	// RequestField is the boolean member of a request's body that asks for them.
	RequestField string
	// ResponsePaths are the places of a response's body where they may stand, as member names from the outside in.
	ResponsePaths [][]string
	// Decode reads what stands there: for each token with a known routing, for each of layers hidden layers (dense ones
	// included, with meaningless content), the top experts by the numbers that they have in the engine's checkpoint.
	Decode func(text string, layers, top int) ([]int32, error)
	// Encode undoes Decode.
	Encode func(ids []int32, layers, top int) string
}

// Flag is one flag that the operator decides about.
type Flag struct {
	// Names are its spellings, the one to use first.
	Names []string
	// Value follows the name; empty for a switch.
	Value string
	// Source names the field of the spec that decides, for messages.
	Source string
	// Forbidden flags are not set, and must not be set by the user either.
	Forbidden bool
}

// Args is the engine's command line: the operator's flags, then the user's. It fails where a user's argument is a flag
// that the operator decides about, and names both.
func (a Adapter) Args(launch Launch, userArgs []string) ([]string, error) {
	var args []string
	for _, flag := range a.Flags(launch) {
		if i := slices.IndexFunc(userArgs, flag.spelled); i >= 0 {
			return nil, fmt.Errorf("spec.engine.args: %q contradicts %s, which decides it: remove the flag", userArgs[i], flag.Source)
		}
		if flag.Forbidden {
			continue
		}
		args = append(args, flag.Names[0])
		if flag.Value != "" {
			args = append(args, flag.Value)
		}
	}
	return append(args, userArgs...), nil
}

// spelled reports whether a command line argument is the flag, in any of its spellings, with or without "=value".
func (f Flag) spelled(arg string) bool {
	name, _, _ := strings.Cut(arg, "=")
	return slices.Contains(f.Names, name)
}
