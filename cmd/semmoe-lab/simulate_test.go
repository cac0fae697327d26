// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/pipeline"
)

// sizes are the flags of a model with the experts of clitest.SmallTrace, which contains no sizes.
var sizes = []string{"--expert-size", "512", "--heads", "8", "--kv-heads", "8", "--query-dim", "128", "--value-dim", "128", "--dense-size", "4096"}

func TestSimulatePrintsMethods(t *testing.T) {
	args := append([]string{"--trace", clitest.SmallTrace(t), "--ep", "4", "--requests", "120", "--outputs", "uniform:1:8", "--seed", "3"}, sizes...)
	var results []simulateReport
	for _, attention := range []string{"dp", "tp"} {
		code, text, message := clitest.Run(t, newSimulateCommand(), append(args, "--attention", attention, "--topology", "pcie")...)
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, message)
		}
		for _, want := range []string{
			"hardware profile h200-nvlink, PCIe islands: 3 MoE layers of 4, 16 experts, top-2, on 4 ranks, attention " + attention, "120 requests with a mean of ", "GOODPUT REQ/S", "TBT P90",
			"\nvanilla ", "\neplb ", "\nmoetuner ", "\nsemmoe ", "none: too few requests",
			"120 requests are too few for a goodput", "Use a larger --requests",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("the output does not contain %q:\n%s", want, text)
			}
		}
		// Without a goodput, the second table still has rows, and all rows of both tables are complete.
		first, second, _ := strings.Cut(text, "RATE REQ/S")
		if rows := strings.Count(second, "\nvanilla "); rows != 8 || strings.Count(first, "none: too few requests  -") != 4 {
			t.Errorf("attention %s: %d rates of the first method:\n%s", attention, rows, text)
		}
		var report simulateReport
		code, text, message = clitest.Run(t, newSimulateCommand(), append(args, "--attention", attention, "--method", "vanilla,semmoe", "--rates", "5,50", "--slo-scale", "1.8", "-o", "json")...)
		if code != 0 || json.Unmarshal([]byte(text), &report) != nil {
			t.Fatalf("exit code %d: %s%s", code, message, text)
		}
		results = append(results, report)
	}
	for _, r := range results {
		if r.Topology != "one node" || r.Ranks != 4 || r.Requests != 120 || r.Shape.ExpertSize != 512 || r.Shape.Hidden != 1024 || len(r.Curves) != 2 {
			t.Errorf("%+v", r)
		}
		for _, c := range r.Curves {
			if len(c.Rates) != 2 || c.Rates[0].Rate != 5 || c.Rates[1].Rate != 50 || c.Goodput <= 5 || c.Served == nil || c.Rates[0].Within < 0.9 {
				t.Errorf("%+v", c)
			}
		}
		// With attention dp, the goodput may come from less waiting instead of more local activations.
		if ours, first := r.Curves[1], r.Curves[0]; ours.Method != "semmoe" || r.Attention == "tp" && *ours.Served.LAR <= *first.Served.LAR {
			t.Errorf("attention %s: our method has a local activation rate of %v, the default %v", r.Attention, *ours.Served.LAR, *first.Served.LAR)
		}
	}
	if results[0].Light == results[1].Light {
		t.Error("attention dp and tp take the same times")
	}
}

// With all-reduce no token is dispatched, so locality is undefined.
func TestSimulateAllReduceHasNoLocality(t *testing.T) {
	args := append([]string{"--trace", clitest.SmallTrace(t), "--ep", "4", "--attention", "tp", "--collective", "all-reduce", "--requests", "120", "--outputs", "2", "--method", "vanilla", "--slo-scale", "2"}, sizes...)
	code, text, message := clitest.Run(t, newSimulateCommand(), args...)
	if lines := strings.Split(text, "\n"); code != 0 || len(lines) < 5 || strings.Fields(lines[4])[4] != "-" {
		t.Errorf("exit code %d: %s%s", code, message, text)
	}
	code, text, message = clitest.Run(t, newSimulateCommand(), append(args, "-o", "json")...)
	var report simulateReport
	if code != 0 || json.Unmarshal([]byte(text), &report) != nil || !strings.Contains(text, `"lar":null`) || report.Curves[0].Served.LAR != nil {
		t.Errorf("exit code %d: %s%s", code, message, text)
	}
}

// A cache that every rank holds completely has the same capacity on several ranks as on one.
func TestSimulateCacheOfRanks(t *testing.T) {
	for name, c := range map[string]struct {
		attention string
		shape     pipeline.Shape
		want      int
	}{
		"dp":            {"dp", pipeline.Shape{KVHeads: 2}, 8},
		"tp":            {"tp", pipeline.Shape{KVHeads: 16}, 8},
		"tp, few heads": {"tp", pipeline.Shape{KVHeads: 2}, 2},
		"tp, latent":    {"tp", pipeline.Shape{KVHeads: 16, KVRank: 512}, 1},
		"dp, latent":    {"dp", pipeline.Shape{KVHeads: 16, KVRank: 512}, 8},
	} {
		flags := simulateFlags{attention: c.attention, ranks: 8, running: 8, collective: "reduce-scatter", messages: "activation", model: pipelineFlags{shape: c.shape}}
		o, err := flags.options(hardware.DefaultProfile())
		if err != nil || o.CacheTokens != c.want*dispatch.DefaultCacheTokens {
			t.Errorf("%s: caches of %d tokens, %v; want %d ranks", name, o.CacheTokens, err, c.want)
		}
	}
}

// A placement that weighs messages between nodes is solved for the simulated hardware.
func TestSimulateSolvesForItsHardware(t *testing.T) {
	p := *hardware.DefaultProfile()
	p.Name = "mine"
	flags := simulateFlags{attention: "tp", objective: "hierarchical", forecast: "table", topology: manyNodes, ranks: 8, ranksPerNode: 4}
	if o, err := flags.solving(&p); err != nil || o.Hardware != &p || o.RanksPerNode != 4 {
		t.Errorf("the profile is %v, of %d ranks per node, error %v", o.Hardware, o.RanksPerNode, err)
	}
}

func TestSimulateRefuses(t *testing.T) {
	path := clitest.SmallTrace(t)
	for want, c := range map[string]struct {
		args []string
		code int
	}{
		"--trace is missing":                              {nil, cli.ExitUsage},
		"no such file":                                    {[]string{"--trace", path + "x"}, cli.ExitInvalidFile},
		"--ep: EP size 3":                                 {[]string{"--trace", path, "--ep", "3"}, cli.ExitUsage},
		"set the flags of the sizes":                      {[]string{"--trace", path, "--ep", "2"}, cli.ExitUsage},
		"the trace 16, top-2":                             {[]string{"--trace", path, "--ep", "2", "--model-path", latentModelDir(t)}, cli.ExitUsage},
		"--attention is \"mp\"":                           {[]string{"--trace", path, "--attention", "mp"}, cli.ExitUsage},
		"--method: method \"ours\"":                       {[]string{"--trace", path, "--method", "ours"}, cli.ExitUsage},
		"--method is empty":                               {[]string{"--trace", path, "--method", ""}, cli.ExitUsage},
		"--topology is \"ring\"":                          {[]string{"--trace", path, "--topology", "ring"}, cli.ExitUsage},
		"--ranks-per-node is 0":                           {[]string{"--trace", path, "--ranks-per-node", "0"}, cli.ExitUsage},
		"--requests is 0":                                 {[]string{"--trace", path, "--requests", "0"}, cli.ExitUsage},
		"--rates has -1":                                  {[]string{"--trace", path, "--rates", "-1"}, cli.ExitUsage},
		"--rates has 1e-303":                              {[]string{"--trace", path, "--rates", "1e-303"}, cli.ExitUsage},
		"--slo-scale is 1e+308":                           {[]string{"--trace", path, "--slo-scale", "1e308"}, cli.ExitUsage},
		"--rates has +Inf":                                {[]string{"--trace", path, "--rates", "5,+Inf"}, cli.ExitUsage},
		"--prompts: ":                                     {[]string{"--trace", path, "--prompts", "many"}, cli.ExitUsage},
		"does not mark the beginning":                     {[]string{"--trace", path, "--outputs", "trace"}, cli.ExitUsage},
		"--policy is \"window\"":                          {[]string{"--trace", path, "--policy", "window"}, cli.ExitUsage},
		"--hold is 2s; allowed is 0 to 1s":                {[]string{"--trace", path, "--hold", "2s"}, cli.ExitUsage},
		"--hold does not apply with --policy masked":      {[]string{"--trace", path, "--hold", "1s", "--policy", "masked"}, cli.ExitUsage},
		"--hold does not apply with attention tp":         {[]string{"--trace", path, "--attention", "tp", "--hold", "1s"}, cli.ExitUsage},
		"--cap is 0.5":                                    {[]string{"--trace", path, "--cap", "0.5"}, cli.ExitUsage},
		"--forecast is decode":                            {[]string{"--trace", path, "--forecast", "decode"}, cli.ExitUsage},
		"--objective: ":                                   {[]string{"--trace", path, "--objective", "speed"}, cli.ExitUsage},
		"--messages: ":                                    {append([]string{"--trace", path, "--ep", "2", "--messages", "none"}, sizes...), cli.ExitUsage},
		"--collective: ":                                  {append([]string{"--trace", path, "--ep", "2", "--attention", "tp", "--collective", "none"}, sizes...), cli.ExitUsage},
		"--weights: weight \"speed\"":                     {append([]string{"--trace", path, "--ep", "2", "--weights", "speed=1"}, sizes...), cli.ExitUsage},
		"--weights does not apply with attention tp":      {[]string{"--trace", path, "--attention", "tp", "--weights", "wait=1"}, cli.ExitUsage},
		"--collective does not apply with attention dp":   {[]string{"--trace", path, "--collective", "all-reduce"}, cli.ExitUsage},
		"--ranks-per-node does not apply with --topology": {[]string{"--trace", path, "--ranks-per-node", "4"}, cli.ExitUsage},
		"--messages does not apply with --collective":     {[]string{"--trace", path, "--attention", "tp", "--collective", "all-reduce", "--messages", "rank"}, cli.ExitUsage},
		"--dispatch does not apply with --collective":     {[]string{"--trace", path, "--attention", "tp", "--collective", "all-reduce", "--dispatch", "fp8"}, cli.ExitUsage},
		"--forecast does not apply with --collective":     {[]string{"--trace", path, "--attention", "tp", "--collective", "all-reduce", "--forecast", "decode"}, cli.ExitUsage},
		"--dispatch is \"int4\"":                          {[]string{"--trace", path, "--dispatch", "int4"}, cli.ExitUsage},
		"--slo-scale is 0":                                {[]string{"--trace", path, "--slo-scale", "0"}, cli.ExitUsage},
		"--slo-percent is 101":                            {[]string{"--trace", path, "--slo-percent", "101"}, cli.ExitUsage},
		"--step-tokens is -1":                             {[]string{"--trace", path, "--step-tokens", "-1"}, cli.ExitUsage},
		"--cache-tokens is -1":                            {[]string{"--trace", path, "--cache-tokens", "-1"}, cli.ExitUsage},
		"--train-percent is 0":                            {[]string{"--trace", path, "--train-percent", "0"}, cli.ExitUsage},
		"--output is \"xml\"":                             {[]string{"--trace", path, "-o", "xml"}, cli.ExitUsage},
		"there are h200-nvlink":                           {[]string{"--trace", path, "--hardware", "abacus"}, cli.ExitUsage},
		"--redundant-slots: -1 redundant slots per rank":  {append([]string{"--trace", path, "--ep", "2", "--redundant-slots", "-1"}, sizes...), cli.ExitUsage},
		"experts on 2 ranks allow 0 to 8":                 {append([]string{"--trace", path, "--ep", "2", "--redundant-slots", "9"}, sizes...), cli.ExitUsage},
		"--running is 1; it must be at least 2":           {append([]string{"--trace", path, "--ep", "2", "--running", "1"}, sizes...), cli.ExitUsage},
		"--step-tokens is 1; it must be at least 2":       {append([]string{"--trace", path, "--ep", "2", "--step-tokens", "1"}, sizes...), cli.ExitUsage},
		"has room for":                                    {append([]string{"--trace", path, "--ep", "2", "--cache-tokens", "10"}, sizes...), cli.ExitUsage},
	} {
		if code, _, message := clitest.Run(t, newSimulateCommand(), c.args...); code != c.code || !strings.Contains(message, want) {
			t.Errorf("%v: exit code %d, %q; want %d and %q", c.args, code, message, c.code, want)
		}
	}
}
