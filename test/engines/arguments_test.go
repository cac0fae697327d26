// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/refengine/server"
	"github.com/semmoe/operator/solver/placement"
)

const tinyModel = "../../internal/refengine/testdata/tiny-qwen3moe"

// types maps the names of dialects to the types of adapters.
var types = map[string]string{"sglang": "SGLang", "vllm": "VLLM", "vllm-ascend": "VLLMAscend", "tensorrt-llm": "TensorRTLLM"}

// eachDialect runs a subtest for each release of each engine, named by the dialect.
func eachDialect(t *testing.T, test func(t *testing.T, dialect string, adapter engine.Adapter, release engine.Release)) {
	for _, dialect := range server.Dialects() {
		t.Run(dialect, func(t *testing.T) {
			d, err := server.FindDialect(dialect)
			if err != nil {
				t.Fatal(err)
			}
			adapter, err := registry.For(types[strings.TrimSuffix(dialect, "-"+d.Release.String())])
			if err != nil {
				t.Fatal(err)
			}
			test(t, dialect, adapter, d.Release)
		})
	}
}

// TestMechanismsAreFlags compares the flags of the operator's tables with the flag lists of the releases: every
// spelling of a flag must be in the lists of exactly the releases that the table contains.
func TestMechanismsAreFlags(t *testing.T) {
	eachDialect(t, func(t *testing.T, dialect string, adapter engine.Adapter, release engine.Release) {
		line, err := readCommandLine(list(dialect), false, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range adapter.Mechanisms {
			if m.Kind != engine.FlagKind {
				continue
			}
			has := !release.Before(m.First) && !(m.Last.Known() && m.Last.Before(release))
			for _, name := range m.Names {
				if got := line.options[name] != nil; got != has {
					t.Errorf("%s %s: the release has flag %s: %t; in the operator's table: %t (%s to %s)", adapter.Type, release, name, got, has, m.First, m.Last)
				}
			}
		}
	})
}

// TestAbbreviations checks that the operator can interpret a prefix of a flag as the flag, as argparse does: no release
// has a flag that is a prefix of a flag in the operator's tables without being in the tables.
func TestAbbreviations(t *testing.T) {
	eachDialect(t, func(t *testing.T, dialect string, adapter engine.Adapter, release engine.Release) {
		line, err := readCommandLine(list(dialect), false, false)
		if err != nil {
			t.Fatal(err)
		}
		var known []string
		for _, m := range adapter.Mechanisms {
			if m.Kind == engine.FlagKind {
				known = append(known, m.Names...)
			}
		}
		for name := range line.options {
			for _, decided := range known {
				if strings.HasPrefix(name, "--") && strings.HasPrefix(decided, name) && !slices.Contains(known, name) {
					t.Errorf("%s %s: flag %s is interpreted as %s", adapter.Type, release, name, decided)
				}
			}
		}
	})
}

// command returns the command line of an engine pod.
func command(t *testing.T, adapter engine.Adapter, launch engine.Launch, userArgs []string) []string {
	t.Helper()
	args, err := adapter.Args(launch, userArgs)
	if err != nil {
		t.Fatalf("%s: %v", adapter.Type, err)
	}
	return slices.Concat(adapter.Command, args)
}

// launches returns the operator's launches for an engine, by purpose.
func launches(t *testing.T, adapter engine.Adapter) map[string]engine.Launch {
	t.Helper()
	plain := engine.Launch{ModelPath: tinyModel, ServedModelName: "tiny", Host: "127.0.0.1", Port: 8000, Ranks: 4, AttentionDP: true}
	change := func(change func(*engine.Launch)) engine.Launch {
		launch := plain
		change(&launch)
		return launch
	}
	all := map[string]engine.Launch{"plain": plain, "attention TP": change(func(l *engine.Launch) { l.AttentionDP = false })}
	if adapter.RoutedExperts.Decode != nil {
		all["sampled"] = change(func(l *engine.Launch) { l.RoutedExperts = true })
		all["reshuffled"] = change(func(l *engine.Launch) { l.RoutedExperts, l.Reshuffled = true, true })
	}
	if adapter.ExpertMap != nil {
		all["map"] = change(func(l *engine.Launch) { l.ExpertMap = expertMap(t, adapter, 0) })
	}
	if adapter.Type != "TensorRTLLM" {
		all["TLS"] = change(func(l *engine.Launch) { l.CertFile, l.KeyFile = "/tls/tls.crt", "/tls/tls.key" })
	}
	if adapter.Nodes != nil {
		all["first of two pods"] = change(func(l *engine.Launch) { l.Nodes, l.NodeRank, l.LeaderAddress = 2, "0", "127.0.0.1" })
		all["second of two pods"] = change(func(l *engine.Launch) { l.Nodes, l.NodeRank, l.LeaderAddress, l.Worker = 2, "1", "127.0.0.1", true })
	}
	for name, launch := range all {
		if adapter.Options != nil {
			launch.OptionsFile = filepath.Join(t.TempDir(), "options.yaml")
			text, err := adapter.Options(launch)
			if err == nil {
				err = os.WriteFile(launch.OptionsFile, text, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			all[name] = launch
		}
	}
	return all
}

// TestOperatorsCommandLines checks that each release accepts the operator's command lines, and that an unknown flag of
// a user is rejected with the engine's error.
func TestOperatorsCommandLines(t *testing.T) {
	backends := map[string][]string{"SGLang": {"--moe-a2a-backend", "deepep"}, "VLLM": {"--all2all-backend", "deepep_low_latency"}}
	eachDialect(t, func(t *testing.T, dialect string, adapter engine.Adapter, release engine.Release) {
		for name, launch := range launches(t, adapter) {
			verdict := adapter.StartupSupport(engine.Situation{Launch: launch, Release: release})
			o, err := options(dialect, command(t, adapter, launch, backends[adapter.Type]))
			switch {
			case err != nil && len(verdict.Refusals) == 0:
				t.Errorf("%s %s, %s: %v", adapter.Type, release, name, err)
				continue
			case err != nil:
				continue
			}
			if o.ModelPath != tinyModel || o.ServedModelName != "tiny" || o.EPSize != 4 || o.EnableDPAttention != launch.AttentionDP || o.EnableReturnRoutedExperts != launch.RoutedExperts || o.Dialect != dialect ||
				o.CertFile != launch.CertFile || o.KeyFile != launch.KeyFile {
				t.Errorf("%s %s, %s: unexpected options %+v", adapter.Type, release, name, o)
			}
			if err := o.Validate(); err != nil {
				t.Errorf("%s %s, %s: %v", adapter.Type, release, name, err)
			}
			_, err = options(dialect, command(t, adapter, launch, []string{"--no-such-flag"}))
			if usage := (usageError{}); !errors.As(err, &usage) {
				t.Errorf("%s %s, %s: unknown flag: got error %v, want a usage error", adapter.Type, release, name, err)
			}
		}
	})
}

// situation is a spec with which an engine may fail at start.
type situation struct {
	engine, realization string
	args, options       string
	env                 map[string]string
	redundant           int32
	microBatches        int32
	routed              bool
	// unseen is true if the operator only warns of the cause, an environment variable.
	unseen bool
}

// TestRefusedBeforeEngineStart compares the specs with which releases fail at start with the specs that the operator
// rejects. If the release is known, the operator must reject a spec with which the engine fails at start. If the
// operator rejects a spec because of its arguments, some release must fail at start.
func TestRefusedBeforeEngineStart(t *testing.T) {
	const byMap, byWeights = string(engine.EngineMap), string(engine.ReshuffledWeights)
	const lmcache, nixl = `--kv-transfer-config {"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}`, `--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}`
	for name, test := range map[string]struct {
		situation
		ends string // releases that fail at start, with the error
	}{
		"copies without a backend":      {situation{engine: "sglang", realization: byMap, redundant: 4}, "0.5.17: ValueError, 0.5.23: ValueError"},
		"copies with a backend":         {situation{engine: "sglang", realization: byMap, redundant: 4, args: "--moe-a2a-backend deepep"}, ""},
		"a backend of a later release":  {situation{engine: "sglang", realization: byMap, args: "--moe-a2a-backend deepep_v2"}, "0.5.12: invalid choice, 0.5.17: invalid choice"},
		"micro-batches with fusion":     {situation{engine: "sglang", microBatches: 2, args: "--moe-a2a-backend deepep --enforce-shared-experts-fusion"}, "0.5.12: ValueError"},
		"micro-batches, no backend":     {situation{engine: "sglang", microBatches: 2}, "0.5.12: ValueError"},
		"--attn-dp-size":                {situation{engine: "sglang", realization: byWeights, args: "--attn-dp-size 2"}, "0.5.12: unrecognized arguments, 0.5.17: unrecognized arguments, 0.5.23: ValueError"},
		"capture":                       {situation{engine: "vllm", routed: true}, ""},
		"capture with LMCache":          {situation{engine: "vllm", routed: true, args: lmcache}, "0.22.0: ValueError, 0.25.1: ValueError"},
		"capture with NIXL":             {situation{engine: "vllm", routed: true, args: nixl}, "0.22.0: ValueError, 0.25.1: ValueError, 0.32.0: ValueError, 0.33.0: ValueError"},
		"NIXL without capture":          {situation{engine: "vllm", args: nixl}, ""},
		"capture, context parallel":     {situation{engine: "vllm", routed: true, args: "-dcp 2"}, "0.32.0: ValueError, 0.33.0: ValueError"},
		"capture, no prefix caching":    {situation{engine: "vllm", routed: true, args: "--no-enable-prefix-caching"}, "0.32.0: ValueError, 0.33.0: ValueError"},
		"capture, disabled prefixes":    {situation{engine: "vllm", routed: true, args: "--disable-prefix-caching"}, "0.22.0: unrecognized arguments, 0.25.1: unrecognized arguments, 0.32.0: unrecognized arguments, 0.33.0: ValueError"},
		"capture, adaptive":             {situation{engine: "vllm", routed: true, args: `--speculative-config {"enable_adaptive_verification":true}`}, "0.32.0: ValueError, 0.33.0: ValueError"},
		"capture, micro-batches":        {situation{engine: "vllm", routed: true, microBatches: 2, args: "--all2all-backend deepep_low_latency"}, "0.32.0: ValueError, 0.33.0: ValueError"},
		"capture, the old runner":       {situation{engine: "vllm", routed: true, env: map[string]string{"VLLM_USE_V2_MODEL_RUNNER": "0"}}, "0.32.0: ValueError, 0.33.0: ValueError"},
		"micro-batches, default":        {situation{engine: "vllm", microBatches: 2}, "0.22.0: AssertionError, 0.25.1: AssertionError, 0.32.0: AssertionError, 0.33.0: AssertionError"},
		"micro-batches, NIXL's backend": {situation{engine: "vllm", microBatches: 2, args: "--all2all-backend nixl_ep"}, "0.22.0: AssertionError"},
		"a map for Ascend":              {situation{engine: "vllm-ascend", realization: byMap}, ""},
		"an unknown member":             {situation{engine: "vllm-ascend", args: `--additional-config {"eplb_config":{"map":"x"}}`}, "0.25.1: ValueError, 0.30.0: ValidationError"},
		"capture on Ascend":             {situation{engine: "vllm-ascend", routed: true}, "0.30.0: ValueError"},
		"capture on Ascend, V2":         {situation{engine: "vllm-ascend", routed: true, env: map[string]string{"VLLM_USE_V2_MODEL_RUNNER": "1"}}, ""},
		"capture on Ascend, map":        {situation{engine: "vllm-ascend", realization: byMap, routed: true}, "0.30.0: ValueError"},
		"map on Ascend, V2":             {situation{engine: "vllm-ascend", realization: byMap, unseen: true, env: map[string]string{"VLLM_USE_V2_MODEL_RUNNER": "1"}}, "0.30.0: ValueError"},
		"WIDEEP":                        {situation{engine: "tensorrt-llm", realization: byMap, options: "moe_config: {backend: WIDEEP}"}, "1.2.0: no such option, 1.3.0: ValidationError"},
		"a map":                         {situation{engine: "tensorrt-llm", realization: byMap}, "1.2.0: no such option"},
		"a map next to MTP":             {situation{engine: "tensorrt-llm", realization: byMap, options: "speculative_config: {decoding_type: MTP}"}, "1.2.0: no such option, 1.3.0: KeyError"},
	} {
		ends := map[string]string{}
		for each := range strings.SplitSeq(test.ends, ", ") {
			release, how, _ := strings.Cut(each, ": ")
			ends[release] = how
		}
		eachDialect(t, func(t *testing.T, dialect string, adapter engine.Adapter, release engine.Release) {
			if dialect != test.engine+"-"+release.String() {
				return
			}
			for variable, value := range test.env {
				t.Setenv(variable, value)
			}
			got, refused := test.start(t, dialect, adapter, release)
			want := ends[release.String()]
			if want == "" && got != nil || want != "" && (got == nil || !strings.Contains(got.Error(), want)) {
				t.Errorf("%s %s, %s: the engine fails with %v, want %q", adapter.Type, release, name, got, want)
			}
			// The engine reports errors in user-provided flags that the operator does not use.
			own := strings.Contains(want, "invalid choice") || strings.Contains(want, "unrecognized") || strings.Contains(test.args, "eplb_config")
			if got != nil && !refused && !own && !test.unseen {
				t.Errorf("%s %s, %s: the operator accepts a spec with which the engine fails: %v", adapter.Type, release, name, got)
			}
		})
	}
}

// start returns the error with which a release fails at start in a situation, and whether the operator rejects the
// spec.
func (s situation) start(t *testing.T, dialect string, adapter engine.Adapter, release engine.Release) (error, bool) {
	t.Helper()
	launch := engine.Launch{
		ModelPath: tinyModel, ServedModelName: "tiny", Host: "127.0.0.1", Port: 8000, Ranks: 4, AttentionDP: true, RoutedExperts: s.routed, RedundantExperts: s.redundant,
		Options: s.options, Overlap: semmoev1.OverlapSpec{MicroBatches: s.microBatches}, Reshuffled: s.realization == string(engine.ReshuffledWeights),
	}
	if s.realization == string(engine.EngineMap) {
		launch.ExpertMap = expertMap(t, adapter, int(s.redundant))
	}
	if adapter.Options != nil {
		launch.OptionsFile = filepath.Join(t.TempDir(), "options.yaml")
		text, err := adapter.Options(launch)
		if err == nil {
			err = os.WriteFile(launch.OptionsFile, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	asked := engine.Situation{Release: release, Launch: launch, UserArgs: strings.Fields(s.args), Family: "qwen3_moe", Realization: engine.Realization(s.realization)}
	for variable, value := range s.env {
		asked.UserEnv = append(asked.UserEnv, variable+"="+value)
	}
	verdict := adapter.StartupSupport(asked)
	if s.realization != "" {
		verdict = adapter.Support(asked)
	}
	refused := len(verdict.Refusals) > 0 || adapter.ValidateOverlap(asked) != nil
	args, err := adapter.Args(launch, asked.UserArgs)
	if err != nil { // also check the engine's result
		refused = true
		args, err = adapter.Args(launch, nil)
		args = append(args, asked.UserArgs...)
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = options(dialect, slices.Concat(adapter.Command, args))
	return err, refused
}

// TestArguments checks that arguments are parsed like argparse, vLLM's parser and click parse them.
func TestArguments(t *testing.T) {
	for name, test := range map[string]struct{ dialect, args, want string }{
		"sglang-0.5.17, two spellings":        {"sglang-0.5.17", "--model tiny --tensor-parallel-size 4", ""},
		"sglang-0.5.17, joined":               {"sglang-0.5.17", "--model-path=tiny", ""},
		"sglang-0.5.17, abbreviated":          {"sglang-0.5.17", "--model-pat tiny", ""},
		"sglang-0.5.17, ambiguous":            {"sglang-0.5.17", "--model-path tiny --ep", ""},
		"sglang-0.5.17, ambiguous prefix":     {"sglang-0.5.17", "--model-path tiny --enable-dp", "ambiguous option"},
		"sglang-0.5.17, no value":             {"sglang-0.5.17", "--model-path", "expected 1 arguments"},
		"sglang-0.5.17, no number":            {"sglang-0.5.17", "--model-path tiny --tp-size four", "invalid int value"},
		"sglang-0.5.17, choice":               {"sglang-0.5.17", "--model-path tiny --moe-a2a-backend allgather", "invalid choice"},
		"sglang-0.5.17, switch with a value":  {"sglang-0.5.17", "--model-path tiny --enable-dp-attention=1", "ignored explicit argument"},
		"sglang-0.5.17, later flag":           {"sglang-0.5.17", "--model-path tiny --attn-dp-size 2", "unrecognized arguments"},
		"sglang-0.5.17, no model":             {"sglang-0.5.17", "--port 1", "required: --model-path"},
		"vllm-0.32.0, underscores":            {"vllm-0.32.0", "tiny --enable_expert_parallel --max_model_len 64", ""},
		"vllm-0.32.0, member":                 {"vllm-0.32.0", "tiny --enable-expert-parallel --kv-transfer-config.kv_connector X", ""},
		"vllm-0.32.0, short":                  {"vllm-0.32.0", "tiny -ep -dp 4", ""},
		"vllm-0.22.0, later flag":             {"vllm-0.22.0", "tiny --return-sampling-mask", "unrecognized arguments"},
		"vllm-0.32.0, switched off":           {"vllm-0.32.0", "tiny --enable-expert-parallel --no-enable-expert-parallel", "this double supports only expert parallelism"},
		"vllm-0.33.0, disabled":               {"vllm-0.33.0", "tiny --enable-expert-parallel --disable-expert-parallel", "this double supports only expert parallelism"},
		"vllm-0.33.0, enabled again":          {"vllm-0.33.0", "tiny --disable-expert-parallel --enable-expert-parallel", ""},
		"vllm-0.33.0, hidden":                 {"vllm-0.33.0", "tiny --enable-expert-parallel --no-enable-expert-parallel", "this double supports only expert parallelism"},
		"tensorrt-llm-1.3.0":                  {"tensorrt-llm-1.3.0", "tiny --tp_size 4 --ep_size 4 --served_model_name x", ""},
		"tensorrt-llm-1.2.0, later flag":      {"tensorrt-llm-1.2.0", "tiny --served_model_name x", "no such option"},
		"tensorrt-llm-1.3.0, no abbreviation": {"tensorrt-llm-1.3.0", "tiny --tp_si 4", "no such option"},
	} {
		d, err := server.FindDialect(test.dialect)
		if err != nil {
			t.Fatal(err)
		}
		engineName := strings.TrimSuffix(test.dialect, "-"+d.Release.String())
		_, err = options(test.dialect, slices.Concat(surfaces[engineName].commands[0], strings.Fields(test.args)))
		if test.want == "" && err != nil && !strings.Contains(err.Error(), "expected 1 arguments") || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}

// expertMap writes a non-default expert map of the small model, and returns its path.
func expertMap(t *testing.T, adapter engine.Adapter, redundant int) string {
	t.Helper()
	text, err := adapter.ExpertMap.Encode(layout(redundant))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), adapter.ExpertMap.File)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// layout places the experts of the small model in descending order, followed on each rank by copies of the first
// experts.
func layout(redundant int) engine.Layout {
	const ranks, experts, layers = 4, 32, 4
	p := &placement.Placement{Ranks: ranks, Experts: experts, SlotsPerRank: (experts + redundant) / ranks}
	for layer := range layers {
		var slots []int
		for rank := range ranks {
			for slot := range experts / ranks {
				slots = append(slots, experts-1-rank*experts/ranks-slot)
			}
			for copied := range redundant / ranks {
				slots = append(slots, (experts-1-rank*experts/ranks-experts/ranks-copied+experts)%experts)
			}
		}
		p.Layers = append(p.Layers, placement.Layer{Layer: layer, Slots: slots})
	}
	return engine.Layout{Placement: p, HiddenLayers: layers}
}
