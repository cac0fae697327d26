package engine

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/solver/placement"
)

// Adapter is one engine's command line and HTTP surface.
type Adapter struct {
	// Type is the engine's name in spec.engine.type.
	Type string
	// Command starts the engine in its stock image.
	Command []string
	// RankHeader pins a request to a data-parallel rank; empty where the engine picks the rank itself, always.
	RankHeader string
	// RankRoutes lists the routes that ignore RankHeader.
	RankRoutes RankRoutes
	// RoutingKeyHeader tells the engine which of the requests that wait on a rank belong in one batch; empty where it takes
	// no such hint.
	RoutingKeyHeader string
	// HealthPath answers 200 once the engine serves.
	HealthPath string
	// ExpertMap is the file that says which expert sits in which slot; nil where the engine reads none.
	ExpertMap *ExpertMap
	// CopyRule is how the engine chooses among the copies of an expert with attention data parallelism.
	CopyRule placement.CopyRule
	// RoutedExperts is how responses tell which experts their tokens activated; its zero value where they cannot.
	RoutedExperts RoutedExperts
	// Generation runs prompts of token ids; its zero value where routed experts cannot be told.
	Generation Generation
	// CountsActivations reports that an engine of the type may count local activations itself, at /metrics of its pods (internal/router/enginecounts).
	CountsActivations bool
	// StepMetrics are the metrics at /metrics by which the engine counts the tokens of its steps; nil where no metric does.
	StepMetrics *StepMetrics
	// Flags lists the flags that follow from a launch.
	Flags func(Launch) []Flag
	// Variables lists the environment variables that must not be set in a launch; nil for none.
	Variables func(Launch) []Variable
	// Options is the content of the options file that the engine reads at Launch.OptionsFile; nil where flags say it all.
	Options func(Launch) ([]byte, error)
	// CheckOptions fails where Launch.Options cannot be read, or sets what other fields decide, and names the field. It is nil where Options is.
	CheckOptions func(Launch) error
	// TensorParallelExchange tells that an all-to-all can carry tokens between ranks also where attention is tensor parallel. Elsewhere
	// every rank has every token then, and no placement saves anything.
	TensorParallelExchange bool
	// CheckOverlap tells why the engine, or its model where that is known, cannot do the situation's Launch.Overlap, and names the field;
	// nil where it has no flag for any of it. Call Adapter.Overlaps.
	CheckOverlap func(Situation) error
	// Nodes is how a replica is spread over several pods; nil where flags alone cannot do that.
	Nodes *Nodes
	// Check adds to a verdict what only this engine, or some of its models, cannot do; nil for nothing.
	Check func(Situation, *Support)
	// CheckStart adds to a verdict why the engine would not start, or not do what is asked for, with a plan or without; nil for nothing.
	CheckStart func(Situation, *Support)

	// IgnoresTiedEmbeddings reports whether the engine leaves the output projection of a family, by model_type, empty where the checkpoint ties
	// it to the embeddings and has no tensor of it. The command is the user's, which may start another engine; nil stands for never.
	IgnoresTiedEmbeddings func(family string, command []string) bool

	// Images are the last parts of the repositories of the engine's stock images, whose tags name releases.
	Images []string
	// ReleasePath answers with the engine's release, for ReadRelease.
	ReleasePath string
	// Oldest and Newest are the oldest and the newest release that Mechanisms is about.
	Oldest, Newest Release
	// Mechanisms lists every part of the engine's surface that is used, set, refused or known.
	Mechanisms []Mechanism
}

// HasRoute reports whether a release of the engine that was read has a route. Mechanisms lists those routes that the request router serves.
func (a Adapter) HasRoute(path string) bool {
	return slices.ContainsFunc(a.Mechanisms, func(m Mechanism) bool { return m.Kind == RouteKind && slices.Contains(m.Names, path) })
}

// Pins tells that requests can be sent to a rank of the engine's.
func (a Adapter) Pins() bool { return a.RankHeader != "" }

// RankRoutes lists the routes on which an engine ignores its rank header.
type RankRoutes struct {
	// Field is the integer member of a request's body that pins a request on the routes InField.
	Field   string
	InField []string
	// Unpinned are the routes on which the engine always picks the rank itself.
	Unpinned []string
	// Reported is the integer member of an answer that contains the rank that served; empty where no answer does.
	Reported string
}

// OnRoute returns what pins a request to a route: the rank header, a body member, or nothing.
func (a Adapter) OnRoute(route string) (header, field string) {
	switch {
	case slices.Contains(a.RankRoutes.Unpinned, route):
		return "", ""
	case a.RankRoutes.FieldOn(route) != "":
		return "", a.RankRoutes.Field
	}
	return a.RankHeader, ""
}

// FieldOn returns the body member that pins a request to a route; empty where the header does, or nothing.
func (r RankRoutes) FieldOn(route string) string {
	if slices.Contains(r.InField, route) {
		return r.Field
	}
	return ""
}

// NamesRank reports whether a header or a member of a body chooses a data-parallel rank. It covers every name that an engine reads:
// X-Data-Parallel-Rank (SGLang, vLLM), X-Override-Routed-Dp-Rank and X-Override-Disagg-Prefill-Dp-Rank (SGLang), and SGLang's members
// routed_dp_rank, data_parallel_rank and disagg_prefill_dp_rank. Case and the choice between - and _ do not matter.
func NamesRank(name string) bool {
	name = strings.ToLower(strings.ReplaceAll(name, "-", "_"))
	return strings.HasSuffix(name, "dp_rank") || strings.HasSuffix(name, "data_parallel_rank")
}

// TellsExperts tells that the engine can be asked which experts a request's tokens activated.
func (a Adapter) TellsExperts() bool { return a.RoutedExperts.Decode != nil }

// CheckExchange fails where no all-to-all carries tokens between ranks, which is what plans make cheaper, and names the field.
func (a Adapter) CheckExchange(launch Launch) error {
	if launch.AttentionDP || a.TensorParallelExchange {
		return nil
	}
	return fmt.Errorf("spec.parallelism.attention: with TensorParallel (data-parallel size 1) every rank of %s has every token, and there is no all-to-all that a plan could make cheaper: use DataParallel, or serve without spec.profiling and spec.placement.planRef", a.Type)
}

// Nodes is how an engine is spread over several pods, each with as many of the ranks. Pod 0 answers requests for all.
type Nodes struct {
	// AttentionDP tells that attention must be data parallel.
	AttentionDP bool
	// WorkersAnswer tells that the other pods answer HealthPath too.
	WorkersAnswer bool
}

// CheckNodes fails where the engine cannot be spread over the launch's number of pods, and names the field.
func (a Adapter) CheckNodes(launch Launch) error {
	const field = "spec.parallelism.podsPerReplica"
	switch n := launch.Nodes; {
	case n <= 1:
		return nil
	case launch.Ranks%n != 0:
		return fmt.Errorf("%s: %d does not divide spec.parallelism.expertParallelSize, which is %d: every pod has as many ranks", field, n, launch.Ranks)
	case a.Nodes == nil:
		return fmt.Errorf("%s: %d: %s cannot be spread over pods by flags alone; use 1", field, n, a.Type)
	case a.Nodes.AttentionDP && !launch.AttentionDP:
		return fmt.Errorf("%s: %d needs spec.parallelism.attention DataParallel with %s; use that, or 1", field, n, a.Type)
	}
	return nil
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
	// RedundantExperts is how many slots of a layer ExpertMap has beyond one for each expert.
	RedundantExperts int32
	// Reshuffled tells that the experts of the checkpoint at ModelPath stand in a plan's order.
	Reshuffled bool
	// AttentionDP is true where each rank computes the attention of its own requests.
	AttentionDP bool
	// Nodes is the number of pods that the ranks of a replica are spread over; 0 and 1 are one pod.
	Nodes int32
	// NodeRank is the number of the pod among them, as its command line sees it, and Worker tells that it is not 0. LeaderAddress is
	// where pod 0 is found. All are empty with one pod.
	NodeRank, LeaderAddress string
	Worker                  bool
	// OptionsFile is the path of the file with the adapter's Options, where it has any.
	OptionsFile string
	// Options are user-provided options, as YAML, that are merged into that file; empty for none.
	Options string
	// Overlap is how exchange and computation are to go on beside each other; its zero value sets nothing.
	Overlap semmoev1.OverlapSpec
}

// OptionsField is the field of the spec that Launch.Options comes from.
const OptionsField = "spec.engine.options"

// ValidateOptions fails where an engine has no options file, or cannot take the user's options, and names the field.
func (a Adapter) ValidateOptions(launch Launch) error {
	switch {
	case launch.Options == "":
		return nil
	case a.CheckOptions == nil:
		return fmt.Errorf("%s is invalid: %s has no options file; use spec.engine.args", OptionsField, a.Type)
	}
	return a.CheckOptions(launch)
}

// PlacementMatters tells that somebody relies on knowing where the engine has its experts: a plan puts them there, or what
// is observed is compared with where they are.
func (l Launch) PlacementMatters() bool { return l.RoutedExperts || l.Planned() }

// Planned tells that the engine serves under a plan.
func (l Launch) Planned() bool { return l.ExpertMap != "" || l.Reshuffled }

// PlanSource names what decides about the placement of experts, for messages.
const PlanSource = "the plan of spec.profiling"

// RoutedExperts is how an engine is asked for the experts that a request's tokens activated, and how it answers.
type RoutedExperts struct {
	// RequestField is the boolean member of a request's body that asks for them. An engine that answers Unasked ignores
	// it; between a client and the router it says all the same that the client wants them.
	RequestField string
	// StartField is the member of a request's body by which a client leaves out what is told of its first tokens.
	StartField string
	// Unasked reports that an engine started with the flag for it puts them into every response, or, as vLLM with the plug-in of
	// integrations/vllm, into the responses to requests that ask for them.
	Unasked bool
	// UnstreamedOnly tells that streamed responses do not have them.
	UnstreamedOnly bool
	// ResponsePaths are the places of a response's body where they may stand, as member names from the outside in. A path
	// leads through every element of an array.
	ResponsePaths [][]string
	// Decode reads what stands there: for each token with a known routing, for each of layers hidden layers (dense ones
	// included, with meaningless content), the top experts by the numbers that they have in the engine's checkpoint.
	Decode func(text string, layers, top int) ([]int32, error)
	// Renumber returns an editor of what stands there that gives experts other numbers.
	Renumber func(layers, top int, logical Logical) TextEditor
}

// Generation is how an engine, or the request router in front of it, runs a prompt of token ids and tells its experts.
type Generation struct {
	// TokenizePath takes {"prompt"} or {"messages"} and answers {"tokens"}.
	TokenizePath string
	// Path takes the Body for a prompt, to be continued greedily by a number of tokens.
	Path string
	Body func(prompt []int32, newTokens int) map[string]any
	// Answer reads the generated tokens, and the text that RoutedExperts.Decode takes, from the response's JSON. The text
	// is empty where the response has none.
	Answer func(response []byte) (generated []int32, routedExperts string, err error)
}

// Flag is one flag that the operator decides about.
type Flag struct {
	// Names are its spellings, the one to use first. A flag without names is a positional argument.
	Names []string
	// Value follows the name; empty for a switch.
	Value string
	// Source names the field of the spec that decides, for messages.
	Source string
	// Forbidden flags are not set, and must not be set by the user either.
	Forbidden bool
	// Members are those of the flag's JSON object that are Forbidden, where the user may set others.
	Members []string
	// Why is why the user must not set it, and what to do instead, where that is no contradiction of Source.
	Why string
}

// Variable is an environment variable that the user must not set.
type Variable struct {
	Name string
	// Source names what decides instead, for messages.
	Source string
}

// Args is the engine's command line: the operator's flags, then the user's. It fails where a user's argument is a flag
// that the operator decides about, and names both.
func (a Adapter) Args(launch Launch, userArgs []string) ([]string, error) {
	var args []string
	for _, flag := range a.Flags(launch) {
		if err := flag.check(userArgs); err != nil {
			return nil, fmt.Errorf("spec.engine.args: %w", err)
		}
		if flag.Forbidden {
			continue
		}
		if len(flag.Names) > 0 {
			args = append(args, flag.Names[0])
		}
		if flag.Value != "" {
			args = append(args, flag.Value)
		}
	}
	return append(args, userArgs...), nil
}

// check fails where the user's arguments set what the flag decides.
func (f Flag) check(userArgs []string) error {
	for _, given := range occurrences(userArgs, f.Names...) {
		switch {
		case len(f.Members) > 0:
			if err := f.checkMembers(given); err != nil {
				return err
			}
		case f.Why != "":
			return fmt.Errorf("%q %s", given.arg, f.Why)
		default:
			return fmt.Errorf("%q contradicts %s, which decides it: remove the flag", given.arg, f.Source)
		}
	}
	return nil
}

// checkMembers fails where an occurrence sets a member that the user must not, or what cannot be read.
func (f Flag) checkMembers(given occurrence) error {
	members := map[string]json.RawMessage{}
	if given.member != "" {
		members[given.member] = nil
	} else if err := json.Unmarshal([]byte(given.value), &members); err != nil {
		return fmt.Errorf("%s: %.100q is no JSON object (%w): write one, such as {}, or remove the flag", f.Names[0], given.value, err)
	}
	for _, member := range f.Members {
		if _, has := members[member]; has {
			return fmt.Errorf("%s in %s contradicts %s, which decides it: remove the member", member, f.Names[0], f.Source)
		}
	}
	return nil
}

// FlagFile refuses a file of flags: what is refused among the user's flags could stand in it, and nobody sees that.
func FlagFile(name string) Flag {
	return Flag{Names: []string{name}, Source: PlanSource, Forbidden: true, Why: "names a file that may set flags which " + PlanSource + " decides: put its flags into spec.engine.args"}
}

// CheckEnv fails where one of the user's environment variables, given by name, is one that must not be set, and names both, and the field.
func (a Adapter) CheckEnv(launch Launch, field string, userEnv []string) error {
	if a.Variables == nil {
		return nil
	}
	for _, variable := range a.Variables(launch) {
		if slices.Contains(userEnv, variable.Name) {
			return fmt.Errorf("%s: %s contradicts %s, which decides it: remove the variable", field, variable.Name, variable.Source)
		}
	}
	return nil
}

// spelled reports whether a command line argument is the flag, in any of its spellings, with or without "=value". SGLang and vLLM read their
// arguments with argparse, which takes a prefix of a flag for the flag.
func (f Flag) spelled(arg string) bool {
	given := flagName(arg)
	long := len(given) > len("--") && strings.HasPrefix(given, "--")
	return slices.ContainsFunc(f.Names, func(name string) bool {
		name = flagName(name)
		return name == given || long && strings.HasPrefix(name, given)
	})
}

// flagName is the flag that an argument names. vLLM takes underscores for dashes, and --flag.member for a member of a
// flag's JSON; no engine has two flags that differ only by that.
func flagName(arg string) string {
	name, _, _ := strings.Cut(arg, "=")
	name, _, _ = strings.Cut(name, ".")
	return strings.ReplaceAll(name, "_", "-")
}

// occurrence is one place of a command line where a flag is given: as the argument arg, for the whole flag or, as --flag.member, for a
// member of its JSON object, with a value, which is empty for a switch.
type occurrence struct{ arg, member, value string }

// occurrences are those of a flag, by any of its names, in the order of the command line.
func occurrences(args []string, names ...string) []occurrence {
	var all []occurrence
	for i, arg := range args {
		if !(Flag{Names: names}).spelled(arg) {
			continue
		}
		name, value, joined := strings.Cut(arg, "=")
		if !joined && i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
			value = args[i+1]
		}
		_, path, _ := strings.Cut(name, ".")
		member, _, _ := strings.Cut(path, ".")
		all = append(all, occurrence{arg, strings.TrimSuffix(member, "+"), value}) // --flag.member+ is a list
	}
	return all
}

// FlagValue is the last value that a command line gives a flag, by any of its names; a switch has an empty one.
func FlagValue(args []string, names ...string) (value string, given bool) {
	all := occurrences(args, names...)
	if len(all) == 0 {
		return "", false
	}
	return all[len(all)-1].value, true
}

// FlagMembers returns the members of a flag's JSON object, as --flag and --flag.member on a command line set them; nil where no value can be
// read as an object.
func FlagMembers(args []string, names ...string) map[string]any {
	var members map[string]any
	for _, given := range occurrences(args, names...) {
		if given.member == "" {
			members = nil // the last object counts
			_ = json.Unmarshal([]byte(given.value), &members)
			continue
		}
		if members == nil {
			members = map[string]any{}
		}
		var value any
		if json.Unmarshal([]byte(given.value), &value) != nil {
			value = given.value
		}
		members[given.member] = value
	}
	return members
}
