// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/solver/placement"
)

// Adapter describes one engine's command line and HTTP API.
type Adapter struct {
	// Type is the name of the engine in spec.engine.type.
	Type string
	// Command is the command that starts the engine in its stock image.
	Command []string
	// RankHeader is the request header that pins a request to a data-parallel rank. It is empty if the engine always
	// picks the rank itself.
	RankHeader string
	// RankRoutes lists the routes on which the engine ignores RankHeader.
	RankRoutes RankRoutes
	// RoutingKeyHeader is the request header that marks requests which should be batched together while they wait on a
	// rank. It is empty if the engine does not support such a hint.
	RoutingKeyHeader string
	// HealthPath is the path that returns 200 when the engine is ready to serve.
	HealthPath string
	// ExpertMap is the format of the file that maps experts to slots. It is nil if the engine does not read one.
	ExpertMap *ExpertMap
	// CopyRule is the rule by which the engine chooses among the copies of an expert with attention data parallelism.
	CopyRule placement.CopyRule
	// RoutedExperts describes how responses report the experts that their tokens activated. Its zero value means that
	// the engine cannot report them.
	RoutedExperts RoutedExperts
	// Generation describes how to run prompts of token ids. Its zero value means that the engine cannot report routed
	// experts.
	Generation Generation
	// CountsActivations reports whether an engine of this type may count local activations itself, at /metrics of its
	// pods (internal/router/enginecounts).
	CountsActivations bool
	// StepMetrics names the metrics at /metrics that count the tokens per engine step. It is nil if no such metrics
	// exist.
	StepMetrics *StepMetrics
	// Flags returns the flags for a launch.
	Flags func(Launch) []Flag
	// Variables returns the environment variables that must not be set in a launch. A nil function means none.
	Variables func(Launch) []Variable
	// Options returns the content of the options file that the engine reads at Launch.OptionsFile. It is nil if flags
	// are sufficient.
	Options func(Launch) ([]byte, error)
	// CheckOptions returns an error that names the field if Launch.Options cannot be parsed, or sets members that other
	// fields decide. It is nil if Options is nil.
	CheckOptions func(Launch) error
	// CrashesOnUnknownTokens reports that a prompt with a token id outside of the vocabulary ends the engine. Routers
	// reject such prompts.
	CrashesOnUnknownTokens bool
	// TensorParallelExchange reports whether an all-to-all can carry tokens between ranks even with tensor-parallel
	// attention. Without it, every rank has every token in this case, and no placement has a benefit.
	TensorParallelExchange bool
	// CheckOverlap returns an error that names the field if the engine, or its model if known, does not support
	// Launch.Overlap. It is nil if the engine has no flags for overlap. Call Adapter.Overlaps instead.
	CheckOverlap func(Situation) error
	// OverlapThresholds are the engine's default thresholds for micro-batches. It is nil if the engine has no flags for
	// them: then it splits every step.
	OverlapThresholds *OverlapThresholds
	// Nodes describes how a replica is spread over several pods. It is nil if that is not possible with flags only.
	Nodes *Nodes
	// Check adds the limitations of this engine, or of some of its models, to a verdict. It may be nil.
	Check func(Situation, *Support)
	// CheckStart adds to a verdict why the engine would fail at startup or not behave as requested, with or without a
	// plan. It may be nil.
	CheckStart func(Situation, *Support)

	// IgnoresTiedEmbeddings reports whether the engine leaves the output projection of a family (model_type)
	// uninitialised if the checkpoint ties it to the embeddings and has no tensor for it. The command is user-provided
	// and may start another engine. A nil function means never.
	IgnoresTiedEmbeddings func(family string, command []string) bool

	// Images lists the last path components of the repositories of the engine's stock images. Their tags name releases.
	Images []string
	// ReleasePath is the path that returns the engine's release, for ReadRelease.
	ReleasePath string
	// Oldest and Newest are the oldest and the newest release that Mechanisms covers.
	Oldest, Newest Release
	// Mechanisms lists every part of the engine's interface that is used, set, refused or known.
	Mechanisms []Mechanism
	// Routes lists the engine's routes for POST requests of clients (APIs).
	Routes []Route
	// Administrative lists the routes that no client may reach: for control, weights, caches, sessions, profiles and
	// metrics. Routes below them are administrative too.
	Administrative []string
}

// HasRoute reports whether any checked release of the engine has a route of the request router.
func (a Adapter) HasRoute(path string) bool {
	return slices.ContainsFunc(a.Routes, func(r Route) bool { return r.Path == path })
}

// CanPinRank reports whether requests can be pinned to a rank of the engine.
func (a Adapter) CanPinRank() bool { return a.RankHeader != "" }

// RankRoutes lists the routes on which an engine ignores its rank header. NewRankRoutes derives it from Adapter.Routes.
type RankRoutes struct {
	// Field is the integer member of a request's body that pins a request on the routes InField.
	Field   string
	InField []string
	// Unpinned lists the routes on which the engine always picks the rank itself.
	Unpinned []string
	// Mixed lists the routes on which some releases read the rank and others pick it themselves.
	Mixed []string
	// Reported is the integer member of a response that contains the serving rank. It is empty if no response contains
	// the rank.
	Reported string
}

// OnRoute returns the rank header or the body member that pins a request on a route. Both are empty if requests cannot
// be pinned on the route.
func (a Adapter) OnRoute(route string) (header, field string) {
	switch {
	case slices.Contains(a.RankRoutes.Unpinned, route):
		return "", ""
	case a.RankRoutes.FieldOn(route) != "":
		return "", a.RankRoutes.Field
	}
	return a.RankHeader, ""
}

// FieldOn returns the body member that pins a request on a route. It is empty if the route uses the header, or does not
// support pinning.
func (r RankRoutes) FieldOn(route string) string {
	if slices.Contains(r.InField, route) {
		return r.Field
	}
	return ""
}

// NamesRank reports whether a header or a body member selects a data-parallel rank. It covers every name that an engine
// reads: X-Data-Parallel-Rank (SGLang, vLLM), X-Override-Routed-Dp-Rank and X-Override-Disagg-Prefill-Dp-Rank (SGLang),
// and SGLang's members routed_dp_rank, data_parallel_rank and disagg_prefill_dp_rank. Case and the choice between - and
// _ are ignored.
func NamesRank(name string) bool {
	name = strings.ToLower(strings.ReplaceAll(name, "-", "_"))
	return strings.HasSuffix(name, "dp_rank") || strings.HasSuffix(name, "data_parallel_rank")
}

// ReportsRoutedExperts reports whether the engine can return the experts that a request's tokens activated.
func (a Adapter) ReportsRoutedExperts() bool { return a.RoutedExperts.Decode != nil }

// CheckExchange returns an error that names the field if no all-to-all carries tokens between ranks. Plans reduce only
// the cost of this exchange.
func (a Adapter) CheckExchange(launch Launch) error {
	if launch.AttentionDP || a.TensorParallelExchange {
		return nil
	}
	return fmt.Errorf("spec.parallelism.attention: with TensorParallel, every rank of %s has every token, so there is no all-to-all exchange that a plan could reduce. Use DataParallel, or serve without spec.profiling and spec.placement.planRef", a.Type)
}

// Nodes describes how an engine is spread over several pods with equal numbers of ranks. Pod 0 serves requests for all
// ranks.
type Nodes struct {
	// AttentionDP reports whether attention must be data parallel.
	AttentionDP bool
	// WorkersServeHealth reports whether the other pods serve HealthPath too.
	WorkersServeHealth bool
}

// CheckNodes returns an error that names the field if the engine cannot be spread over the launch's number of pods.
func (a Adapter) CheckNodes(launch Launch) error {
	const field = "spec.parallelism.podsPerReplica"
	switch n := launch.Nodes; {
	case n <= 1:
		return nil
	case launch.Ranks%n != 0:
		return fmt.Errorf("%s: %d does not divide spec.parallelism.expertParallelSize, which is %d: all pods must have the same number of ranks", field, n, launch.Ranks)
	case a.Nodes == nil:
		return fmt.Errorf("%s: %d: %s cannot be spread over pods with flags; use 1", field, n, a.Type)
	case a.Nodes.AttentionDP && !launch.AttentionDP:
		return fmt.Errorf("%s: %d needs spec.parallelism.attention DataParallel with %s; use that, or 1", field, n, a.Type)
	}
	return nil
}

// Launch contains the parameters with which an engine is started.
type Launch struct {
	// ModelPath is the directory of the checkpoint in the engine's container.
	ModelPath string
	// ServedModelName is the model name that clients send.
	ServedModelName string
	// Host and Port are the listen address of the engine.
	Host string
	Port int32
	// CertFile and KeyFile are the PEM files with the certificate and the private key of the engine. They are empty for
	// an engine that serves plain text.
	CertFile, KeyFile string
	// Ranks is the expert-parallel size, which is the number of devices of the replica.
	Ranks int32
	// RoutedExperts requests an engine that can return the experts that a request's tokens activated.
	RoutedExperts bool
	// ExpertMap is the file that maps experts to slots. It is empty for the engine's own placement.
	ExpertMap string
	// RedundantExperts is the number of slots per layer in ExpertMap beyond one for each expert.
	RedundantExperts int32
	// Reshuffled reports whether the experts of the checkpoint at ModelPath are in a plan's order.
	Reshuffled bool
	// AttentionDP reports whether each rank computes attention only for the requests of this rank.
	AttentionDP bool
	// Nodes is the number of pods over which the ranks of a replica are spread. 0 and 1 mean one pod.
	Nodes int32
	// NodeRank is the index of the pod among them, as used in its command line. Worker reports whether the index is not
	// 0. LeaderAddress is the address of pod 0. With one pod, all three are empty.
	NodeRank, LeaderAddress string
	Worker                  bool
	// OptionsFile is the path of the file with the adapter's Options, if any.
	OptionsFile string
	// Options are user-provided options, in YAML, that are merged into this file. They may be empty.
	Options string
	// KVEventsPort is the first port for KV events; 0 means none.
	KVEventsPort int32
	// Overlap describes how exchange and computation overlap. Its zero value sets nothing.
	Overlap semmoev1.OverlapSpec
}

// OptionsField is the field of the spec that sets Launch.Options.
const OptionsField = "spec.engine.options"

// ValidateOptions returns an error that names the field if the engine has no options file, or does not accept the
// user-provided options.
func (a Adapter) ValidateOptions(launch Launch) error {
	switch {
	case launch.Options == "":
		return nil
	case a.CheckOptions == nil:
		return fmt.Errorf("%s is invalid: %s has no options file; use spec.engine.args", OptionsField, a.Type)
	}
	return a.CheckOptions(launch)
}

// NeedsKnownPlacement reports whether the location of the experts must be known: a plan defines it, or observed
// activations are compared with it.
func (l Launch) NeedsKnownPlacement() bool { return l.RoutedExperts || l.HasPlan() }

// HasPlan reports whether the engine serves under a plan.
func (l Launch) HasPlan() bool { return l.ExpertMap != "" || l.Reshuffled }

// PlanSource names the source of the placement of experts in messages.
const PlanSource = "the plan of spec.profiling"

// RoutedExperts describes how to request the experts that a request's tokens activated, and how the engine returns
// them.
type RoutedExperts struct {
	// RequestField is the boolean member of a request's body that requests routed experts. An engine with Unasked set
	// ignores the member, but the router still uses it to detect that the client wants them.
	RequestField string
	// StartField is the member of a request's body with which a client omits the routed experts of the first tokens.
	StartField string
	// Unrequested reports that an engine started with the corresponding flag adds routed experts to every response, or, as
	// vLLM with the plug-in of integrations/vllm, to the responses to requests that ask for them.
	Unrequested bool
	// NonStreamingOnly reports that streamed responses do not contain routed experts.
	NonStreamingOnly bool
	// ResponsePaths lists the possible locations of routed experts in a response's body, as member names from the
	// outside in. A path applies to every element of an array on its way.
	ResponsePaths [][]string
	// Decode decodes the text at such a location. It returns, for each token with a known routing and each of layers
	// hidden layers, the top experts, numbered as in the engine's checkpoint. Dense layers are included, with
	// meaningless content.
	Decode func(text string, layers, top int) ([]int32, error)
	// Renumber returns an editor for this text that renumbers the experts.
	Renumber func(layers, top int, logical Logical) TextEditor
	// TokenIDs describes how a response also gets the ids of the tokens that the experts belong to. The engine applies
	// the chat template, which the router does not have.
	TokenIDs TokenIDs
}

// TokenIDs describes how a request asks for the ids of the tokens of its prompt and its answers.
type TokenIDs struct {
	// RequestField is the boolean member of a request's body. Engines read it on routes with API.ReturnsTokenIDs, and
	// can refuse it for streams.
	RequestField string
	// PromptPaths and AnswerPaths list the possible locations of the ids in a response, like ResponsePaths.
	PromptPaths, AnswerPaths [][]string
	// Null reports that a response to another request contains these members with the value null. Otherwise it does
	// not contain them.
	Null bool
}

// Generation describes how an engine, or the request router in front of it, runs a prompt of token ids and returns its
// routed experts.
type Generation struct {
	// TokenizePath is the route that accepts {"prompt"} or {"messages"} and returns {"tokens"}.
	TokenizePath string
	// Path is the route that accepts Body. Body returns the request body for a prompt that is continued by a number of
	// tokens. Temperature 0 selects the most probable tokens; at other temperatures, an engine that allows it draws the
	// same tokens for the same seed.
	Path string
	Body func(prompt []int32, newTokens int, temperature float64, seed int64) map[string]any
	// Answer reads the generated tokens, and the text for RoutedExperts.Decode, from the response's JSON. The text is
	// empty if the response does not contain it.
	Answer func(response []byte) (generated []int32, routedExperts string, err error)
}

// Flag is a command-line flag that the operator controls.
type Flag struct {
	// Names are the spellings of the flag. The operator uses the first one. A flag without names is a positional
	// argument.
	Names []string
	// Value is the value after the name. It is empty for a switch.
	Value string
	// Source is the field of the spec that controls the flag, for messages.
	Source string
	// Forbidden means that the operator does not set the flag and the user must not set it either.
	Forbidden bool
	// Members lists the members of the flag's JSON object that are Forbidden. The user may set other members.
	Members []string
	// Why explains why the user must not set the flag, and what to do instead. It replaces the default message about
	// Source.
	Why string
}

// Variable is an environment variable that the user must not set.
type Variable struct {
	Name string
	// Source names what controls the value instead, for messages.
	Source string
}

// Args returns the engine's command line: the operator's flags, then the user's. It returns an error that names both if
// a user's argument is a flag that the operator controls.
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

// check returns an error if the user's arguments set the flag.
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

// checkMembers returns an error if an occurrence sets a forbidden member, or cannot be parsed.
func (f Flag) checkMembers(given occurrence) error {
	members := map[string]json.RawMessage{}
	if given.member != "" {
		members[given.member] = nil
	} else if err := json.Unmarshal([]byte(given.value), &members); err != nil {
		return fmt.Errorf("%s: %.100q is not a JSON object (%w): use an object, such as {}, or remove the flag", f.Names[0], given.value, err)
	}
	for _, member := range f.Members {
		if _, has := members[member]; has {
			return fmt.Errorf("%s in %s contradicts %s, which decides it: remove the member", member, f.Names[0], f.Source)
		}
	}
	return nil
}

// RefuseFlagFile returns a flag that refuses a file of flags. The file could contain refused flags, and its content is
// not visible to the operator.
func RefuseFlagFile(name string) Flag {
	return Flag{Names: []string{name}, Source: PlanSource, Forbidden: true, Why: "names a file that may set flags which " + PlanSource + " decides: put its flags into spec.engine.args"}
}

// CheckEnv returns an error if a user-provided environment variable, as UserVariables returns it, must not be set. The
// error names the field, the variable and what controls it.
func (a Adapter) CheckEnv(launch Launch, field string, userEnv []string) error {
	if a.Variables == nil {
		return nil
	}
	for _, variable := range a.Variables(launch) {
		if given(userEnv, variable.Name) {
			return fmt.Errorf("%s: %s contradicts %s, which decides it: remove the variable", field, variable.Name, variable.Source)
		}
	}
	return nil
}

// matches reports whether a command-line argument is the flag, in any of its spellings, with or without "=value".
// SGLang and vLLM parse their arguments with argparse, which accepts prefixes of flags.
func (f Flag) matches(arg string) bool {
	given := flagName(arg)
	long := len(given) > len("--") && strings.HasPrefix(given, "--")
	return slices.ContainsFunc(f.Names, func(name string) bool {
		name = flagName(name)
		return name == given || long && strings.HasPrefix(name, given)
	})
}

// flagName returns the name of the flag in an argument. vLLM accepts underscores instead of dashes, and --flag.member
// for a member of a flag's JSON object. No engine has two flags that differ only in these spellings.
func flagName(arg string) string {
	name, _, _ := strings.Cut(arg, "=")
	name, _, _ = strings.Cut(name, ".")
	return strings.ReplaceAll(name, "_", "-")
}

// occurrence is one occurrence of a flag on a command line. arg is the argument. member is empty for the whole flag, or
// the member of its JSON object for --flag.member. value is empty for a switch.
type occurrence struct{ arg, member, value string }

// occurrences returns the occurrences of a flag, by any of its names, in the order of the command line.
func occurrences(args []string, names ...string) []occurrence {
	var all []occurrence
	for i, arg := range args {
		if !(Flag{Names: names}).matches(arg) {
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

// FlagValue returns the last value of a flag on a command line, by any of its names. The value of a switch is empty.
func FlagValue(args []string, names ...string) (value string, given bool) {
	all := occurrences(args, names...)
	if len(all) == 0 {
		return "", false
	}
	return all[len(all)-1].value, true
}

// FlagMembers returns the members of a flag's JSON object, as set by --flag and --flag.member on a command line. It
// returns nil if no value can be parsed as an object.
func FlagMembers(args []string, names ...string) map[string]any {
	var members map[string]any
	for _, given := range occurrences(args, names...) {
		if given.member == "" {
			members = nil // the last object applies
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
