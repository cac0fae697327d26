// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

var evalFields = []string{
	"lar", "baseline_lar", "oracle_lar", "upper_bound", "token_imbalance", "token_imbalance_median", "batch_imbalance",
	"window_imbalance", "expert_imbalance", "expert_window_imbalance", "remote_ranks_per_token", "remote_nodes_per_token", "node_lar", "max_send", "max_recv",
	"modelled_us", "hardware", "gap", "per_layer", "seconds",
}

func solved(t *testing.T, attention string, flags ...string) (string, map[string]any) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "plan")
	args := append([]string{"--trace", clitest.SampleTrace, "--ep", "4", "--attention", attention, "--out", dir}, flags...)
	code, report, message := clitest.RunJSON(t, newSolveCommand(), args...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, message)
	}
	return dir, report
}

func TestSolveAndEvalPrintTheContractFields(t *testing.T) {
	path := clitest.Created(t, tracetest.Generate(tracetest.Small, 1))
	for _, forecast := range []string{"", "table", "prefill", "decode", "transition", "lookback"} {
		attention := "dp"
		var flags []string
		if forecast != "" {
			attention, flags = "tp", []string{"--forecast", forecast}
		}
		dir, report := solved(t, attention, append(flags, "--trace", path)...)
		for _, field := range append([]string{"plan_digest", "algorithm", "train_requests", "test_requests"}, evalFields...) {
			if _, ok := report[field]; !ok {
				t.Errorf("%s: solve does not print %s", attention, field)
			}
		}
		code, got, message := clitest.RunJSON(t, newEvalCommand(), "--trace", path, "--plan", dir)
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, message)
		}
		for _, field := range evalFields {
			value, ok := got[field]
			if !ok {
				t.Errorf("%s: eval does not print %s", attention, field)
			}
			if diff := cmp.Diff(report[field], value); diff != "" && field != "seconds" {
				t.Errorf("%s: eval's %s differs from solve's: %s", attention, field, diff)
			}
		}
		for _, field := range []string{"volume", "baseline_volume"} {
			sent, _ := got[field].(map[string]any)
			if objectives, _ := sent["objectives"].([]any); len(objectives) != 4 || sent["ranks"] != 4. {
				t.Errorf("%s: eval's %s is %v", attention, field, got[field])
			}
		}
		for _, name := range []string{
			"manifest.json", "placement.json", "gate-permutation.json", "tables.safetensors", "engine/sglang.json",
			"engine/vllm-ascend.json", "engine/trtllm.yaml", "report.json",
		} {
			if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
				t.Error(err)
			}
		}
	}
}

// partOfSample writes every nth request of the sample trace, with two of its four layers. The time of a solve is
// proportional to the number of layers.
func partOfSample(t *testing.T, n int) string {
	t.Helper()
	whole, err := trace.Open(t.Context(), clitest.SampleTrace)
	if err != nil {
		t.Fatal(err)
	}
	part := whole.Subset(slices.DeleteFunc(whole.AllRequests(), func(r int) bool { return r%n > 0 }))
	return clitest.Created(t, part.WithLayers([]int{0, 1}))
}

// samplePlans contains the plans that samplePlan has made, and the output of solve, by attention and flags.
var samplePlans = map[string]struct {
	artifact *plan.Artifact
	report   map[string]any
}{}

// samplePart is the part of the sample of samplePlan: enough for flags to change the metrics.
const samplePart = 4

// samplePlan returns a plan for a part of the sample trace, and the output of solve. Each is solved once for all tests.
func samplePlan(t *testing.T, attention string, flags ...string) (string, map[string]any) {
	t.Helper()
	key := attention + " " + strings.Join(flags, " ")
	known, ok := samplePlans[key]
	if !ok {
		dir, report := solved(t, attention, append(flags, "--trace", partOfSample(t, samplePart))...)
		_, artifact, err := plan.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		known.artifact, known.report = artifact, report
		samplePlans[key] = known
	}
	dir := filepath.Join(t.TempDir(), "plan")
	if err := plan.Write(dir, known.artifact, nil); err != nil {
		t.Fatal(err)
	}
	return dir, known.report
}

func TestEvalFlagsChangeMetrics(t *testing.T) {
	path := partOfSample(t, samplePart)
	tp, _ := samplePlan(t, "tp")
	dp, _ := samplePlan(t, "dp")
	prefill, _ := samplePlan(t, "tp", "--forecast", "prefill")
	plain, slow := map[string]map[string]any{}, slowProfile(t)
	for _, dir := range []string{tp, dp, prefill} {
		code, figures, message := clitest.RunJSON(t, newEvalCommand(), "--trace", path, "--plan", dir)
		if code != 0 {
			t.Fatal(message)
		}
		plain[dir] = figures
	}
	for name, test := range map[string]struct {
		dir   string
		flags []string
		field string
	}{
		"all requests":   {tp, []string{"--requests", "all"}, "baseline_lar"},
		"free shards":    {tp, []string{"--shards", "free"}, "batch_imbalance"},
		"token table":    {prefill, []string{"--forecast", "table"}, "lar"},
		"transitions":    {tp, []string{"--forecast", "transition"}, "lar"},
		"small batches":  {tp, []string{"--batch-tokens", "512"}, "lar"},
		"small nodes":    {tp, []string{"--ranks-per-node", "2"}, "node_lar"},
		"masked":         {dp, []string{"--policy", "masked"}, "lar"},
		"window":         {dp, []string{"--policy", "window"}, "lar"},
		"late":           {dp, []string{"--policy", "late"}, "line"},
		"round-robin":    {dp, []string{"--policy", "round-robin"}, "lar"},
		"least-loaded":   {dp, []string{"--policy", "least-loaded"}, "lar"},
		"prefix":         {dp, []string{"--policy", "prefix"}, "lar"},
		"tight cap":      {dp, []string{"--cap", "1.01"}, "window_imbalance"},
		"a single order": {dp, []string{"--orders", "1"}, "window_imbalance"},
		"other machines": {tp, []string{"--hardware", slow}, "modelled_us"},
		"their name":     {tp, []string{"--hardware", slow}, "hardware"},
	} {
		t.Run(name, func(t *testing.T) {
			before := plain[test.dir][test.field]
			_, after, message := clitest.RunJSON(t, newEvalCommand(), append([]string{"--trace", path, "--plan", test.dir}, test.flags...)...)
			if message != "" || cmp.Equal(before, after[test.field]) {
				t.Errorf("%s is %v before and %v after %v; %s", test.field, before, after[test.field], test.flags, message)
			}
		})
	}
}

// groupedTrace writes a trace of 24 experts with the given number of groups in its model config; with 0 it has no
// config.
func groupedTrace(t *testing.T, groups int) string {
	t.Helper()
	tr := tracetest.Generate(tracetest.Shape{
		Experts: 24, TopK: 2, Layers: 2, Vocabulary: 100, Domains: 3, DocumentsPerDomain: 6, RequestsPerDocument: 2, TokensPerRequest: 40, Noise: 10,
		Groups: 6,
	}, 1)
	tr.Model.Config = ""
	if groups > 0 {
		tr.Model.Config = fmt.Sprintf(`{"num_hidden_layers": 3, "n_group": %d}`, groups)
	}
	return clitest.Created(t, tr)
}

// TestSolvePreservesGroups solves for every relation of groups and ranks, and a model without groups.
func TestSolvePreservesGroups(t *testing.T) {
	path := groupedTrace(t, 6)
	for _, attention := range []string{"tp", "dp"} {
		for _, ranks := range []string{"2", "6", "12"} {
			dir, report := solved(t, attention, "--trace", path, "--ep", ranks, "--preserve-groups")
			var permutation reshuffle.Permutation
			text, err := os.ReadFile(filepath.Join(dir, "gate-permutation.json"))
			if err == nil {
				err = json.Unmarshal(text, &permutation)
			}
			if err != nil || len(permutation.Layers) != 2 {
				t.Fatalf("%d layers: %v", len(permutation.Layers), err)
			}
			for _, layer := range permutation.Layers {
				for j, old := range layer.NewToOld {
					if first := layer.NewToOld[j/4*4]; old/4 != first/4 {
						t.Errorf("%s, EP %s: new group %d holds experts of two groups: %v", attention, ranks, j/4, layer.NewToOld)
					}
				}
			}
			if ranks == "6" && report["lar"].(float64) < report["baseline_lar"].(float64) {
				t.Errorf("%s: local activation rate %v, of the default placement %v", attention, report["lar"], report["baseline_lar"])
			}
		}
	}
	_, with := samplePlan(t, "dp", "--preserve-groups")
	_, without := samplePlan(t, "dp")
	if with["plan_digest"] != without["plan_digest"] {
		t.Errorf("for a model without groups the plan is %v with --preserve-groups, %v without", with["plan_digest"], without["plan_digest"])
	}
}

// TestSolveConstraints sets every constraint and every objective on the command line: plans contain them, and eval
// reproduces solve.
func TestSolveConstraints(t *testing.T) {
	path := partOfSample(t, 2)
	current, _ := solved(t, "tp", "--trace", path)
	budget := []string{"--current", current, "--move-budget", "4", "--migration-cost", "1.5"}
	for name, test := range map[string]struct {
		attention string
		flags     []string
		check     func(report map[string]any, p *placement.Placement) bool
	}{
		"pins": {"dp", []string{"--pin", "0:31:0", "--pin", "1:0:3"}, func(_ map[string]any, p *placement.Placement) bool {
			return slices.Equal(p.Hosts(0)[31], []int{0}) && slices.Equal(p.Hosts(1)[0], []int{3})
		}},
		"budget": {"tp", budget, func(report map[string]any, p *placement.Placement) bool {
			moves, ok := report["moves"].(float64)
			return ok && moves <= float64(4*len(p.Layers))
		}},
		"loads": {"dp", []string{"--expert-load-limit", "120"}, func(report map[string]any, _ *placement.Placement) bool {
			return report["limits_met"] == true
		}},
		"no such loads": {"dp", []string{"--expert-load-limit", "100", "--objective", "activation"}, func(report map[string]any, _ *placement.Placement) bool {
			return report["limits_met"] == false && len(report["limits_unmet"].([]any)) > 0
		}},
		"capacity": {"tp", []string{"--rank-capacity", "1,1,1,0.5"}, func(report map[string]any, _ *placement.Placement) bool {
			return report["token_imbalance"].(float64) < 1.02
		}},
		"ranks": {"tp", []string{"--objective", "rank-dedup"}, func(report map[string]any, _ *placement.Placement) bool {
			return report["objective"] == "rank-dedup" && report["remote_ranks_per_token"].(float64) < 2
		}},
		"one node": {"dp", []string{"--objective", "hierarchical"}, func(report map[string]any, _ *placement.Placement) bool {
			return report["remote_nodes_per_token"].(float64) == 0
		}},
		"nodes": {"dp", []string{"--objective", "node-dedup", "--ranks-per-node", "2"}, func(report map[string]any, _ *placement.Placement) bool {
			return report["remote_nodes_per_token"].(float64) < 1
		}},
		"both": {"tp", []string{"--objective", "hierarchical", "--ranks-per-node", "2", "--forecast", "decode"}, func(report map[string]any, _ *placement.Placement) bool {
			return report["remote_nodes_per_token"].(float64) < report["remote_ranks_per_token"].(float64)
		}},
	} {
		dir, report := solved(t, test.attention, append(test.flags, "--trace", path)...)
		p, _, err := plan.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if !test.check(report, p.Placement) {
			t.Errorf("%s: %v", name, report)
		}
		code, again, message := clitest.RunJSON(t, newEvalCommand(), "--trace", path, "--plan", dir)
		if code != 0 {
			t.Fatalf("%s: exit code %d: %s", name, code, message)
		}
		for _, field := range evalFields {
			if diff := cmp.Diff(report[field], again[field]); diff != "" && field != "seconds" {
				t.Errorf("%s: eval's %s differs from solve's: %s", name, field, diff)
			}
		}
	}
}

func TestSolveExitCodes(t *testing.T) {
	dir, path := t.TempDir(), clitest.SmallTrace(t)
	other, _ := solved(t, "dp", "--trace", path)
	current, _, err := plan.Read(other)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := (slices.Index(current.Placement.Layers[0].Slots, 0)/current.Placement.SlotsPerRank + 1) % 4
	nameless := tracetest.Generate(tracetest.Small, 1)
	nameless.Domains, nameless.Model.Domains = nil, nil
	single, astray := tracetest.Small, tracetest.Generate(tracetest.Small, 1)
	single.DocumentsPerDomain, single.RequestsPerDocument = 1, 12
	for r := range astray.Domains {
		astray.Domains[r] = uint8(r % 2 * 3) // each document has requests of both domains
	}
	bad := filepath.Join(dir, "bad.safetensors")
	if err := os.WriteFile(bad, []byte("no trace at all"), 0o644); err != nil {
		t.Fatal(err)
	}
	with := func(flags ...string) []string {
		return append([]string{"--trace", path, "--ep", "4", "--attention", "dp", "--out", filepath.Join(dir, "out")}, flags...)
	}
	grouped := func(groups int, flags ...string) []string {
		return with(append([]string{"--preserve-groups", "--trace", groupedTrace(t, groups)}, flags...)...)
	}
	for name, test := range map[string]struct {
		args []string
		code int
		want string
	}{
		"nothing":         {nil, cli.ExitUsage, "--trace is missing"},
		"unknown flag":    {with("--fast"), cli.ExitUsage, "unknown flag"},
		"an argument":     {with("more"), cli.ExitUsage, "more"},
		"no out":          {with("--out", ""), cli.ExitUsage, "--out is missing"},
		"no attention":    {with("--attention", ""), cli.ExitUsage, "allowed is tp, dp"},
		"no EP size":      {with("--ep", "0"), cli.ExitUsage, "--ep is 0"},
		"no divisor":      {with("--ep", "5"), cli.ExitUsage, "EP size 5 does not divide the 16 experts; allowed is 1, 2, 4, 8, 16"},
		"embeddings":      {with("--attention", "tp", "--forecast", "decode", "--embeddings", "e.npy"), cli.ExitUsage, "--embeddings cannot be combined with --forecast decode"},
		"no look-ahead":   {with("--attention", "tp", "--forecast", "lookahead"), cli.ExitUsage, "the trace has no look-ahead"},
		"forecast":        {with("--forecast", "oracle"), cli.ExitUsage, "allowed is table prefill decode"},
		"forecast of dp":  {with("--forecast", "decode"), cli.ExitUsage, "is for attention tp"},
		"algorithm":       {with("--algorithm", "metis"), cli.ExitUsage, "allowed is auto"},
		"redundant slots": {with("--redundant-slots", "-1"), cli.ExitUsage, "must be at least 0"},
		"too many slots":  {with("--redundant-slots", "25"), cli.ExitUsage, "allow 0 to 12"},
		"slots in words":  {with("--redundant-slots", "many"), cli.ExitUsage, "allowed is a number, or auto"},
		"no memory":       {with("--redundant-slots", "auto"), cli.ExitUsage, "--redundant-slots auto requires --redundant-memory"},
		"memory of slots": {with("--redundant-slots", "1", "--redundant-memory", "8GiB"), cli.ExitUsage, "--redundant-memory is for --redundant-slots auto, not for 1"},
		"memory alone":    {with("--redundant-memory", "8GiB"), cli.ExitUsage, "--redundant-memory is for --redundant-slots auto, not for 0"},
		"memory of 0":     {with("--redundant-slots", "auto", "--redundant-memory", "0"), cli.ExitUsage, "a number of bytes above 0"},
		"negative memory": {with("--redundant-slots", "auto", "--redundant-memory", "-1GiB"), cli.ExitUsage, "a number of bytes above 0"},
		"memory in words": {with("--redundant-slots", "auto", "--redundant-memory", "much"), cli.ExitUsage, "a number of bytes above 0"},
		"unknown sizes":   {with("--redundant-slots", "auto", "--redundant-memory", "8GiB"), cli.ExitUsage, "the size of an expert is unknown"},
		"memory of eplb":  {with("--redundant-slots", "auto", "--redundant-memory", "8GiB", "--algorithm", "eplb"), cli.ExitUsage, "requires objective time and algorithm auto"},
		"one rank":        {with("--redundant-slots", "auto", "--redundant-memory", "8GiB", "--ep", "1"), cli.ExitUsage, "allow 0 to 0"},
		"groups, memory":  {grouped(4, "--redundant-slots", "auto", "--redundant-memory", "8GiB"), cli.ExitUsage, "--preserve-groups: 1 redundant slots per rank"},
		"limit, memory":   {with("--redundant-slots", "auto", "--redundant-memory", "8GiB", "--expert-load-limit", "110"), cli.ExitUsage, "an expert load limit is not supported with redundant slots"},
		"groups and EP":   {grouped(6), cli.ExitUsage, "EP size 4 and the gate's 6 groups"},
		"groups of eplb":  {grouped(4, "--algorithm", "eplb"), cli.ExitUsage, "--preserve-groups: algorithm eplb does not keep groups together"},
		"groups, copies":  {grouped(4, "--redundant-slots", "1"), cli.ExitUsage, "1 redundant slots per rank"},
		"bad groups":      {grouped(5), cli.ExitInvalidFile, "n_group is 5; it must divide the 24 experts"},
		"no config":       {grouped(0), cli.ExitInvalidFile, "model_config is missing in the trace"},
		"objective":       {with("--objective", "dedup"), cli.ExitUsage, "allowed is time activation rank-dedup node-dedup hierarchical"},
		"one node":        {with("--objective", "node-dedup"), cli.ExitUsage, "there is only one node"},
		"nodes":           {with("--ranks-per-node", "0"), cli.ExitUsage, "--ranks-per-node is 0"},
		"pin":             {with("--pin", "1:2"), cli.ExitUsage, "--pin is \"1:2\"; it must be layer:expert:rank"},
		"pinned layer":    {with("--pin", "99:0:0"), cli.ExitUsage, "pin 99:0:0: layer 99 is not a MoE layer"},
		"budget":          {with("--move-budget", "3"), cli.ExitUsage, "needs a current placement"},
		"pin and budget":  {with("--current", other, "--move-budget", "0", "--pin", fmt.Sprintf("1:0:%d", elsewhere)), cli.ExitUsage, "the move budget is 0"},
		"no such domain":  {with("--without-domains", "prose"), cli.ExitUsage, "the trace has no domain \"prose\"; it has domain-0"},
		"no domains":      {with("--trace", clitest.Created(t, nameless), "--without-domains", "prose"), cli.ExitUsage, "the trace names no domains"},
		"other split":     {with("--trace", clitest.Created(t, tracetest.Generate(single, 1)), "--train-percent", "50", "--without-domains", "domain-3"), cli.ExitUsage, "--without-domains is domain-3, which changes the split"},
		"torn documents":  {with("--trace", clitest.Created(t, astray), "--without-domains", "domain-0"), cli.ExitUsage, "and each document one domain"},
		"capacity":        {with("--rank-capacity", "1,2"), cli.ExitUsage, "2 rank capacities for 4 ranks"},
		"load limit":      {with("--expert-load-limit", "50"), cli.ExitUsage, "expert load limit is 50 percent"},
		"token limit":     {with("--token-load-limit", "-1"), cli.ExitUsage, "token load limit is -1 percent"},
		"limit of eplb":   {with("--expert-load-limit", "110", "--algorithm", "eplb"), cli.ExitUsage, "algorithm eplb does not support constraints"},
		"no current plan": {with("--current", filepath.Join(dir, "none")), cli.ExitInvalidFile, "manifest.json is missing"},
		"current of eplb": {with("--current", dir, "--algorithm", "eplb"), cli.ExitUsage, "requires algorithm auto"},
		"other current":   {with("--current", other, "--ep", "8"), cli.ExitUsage, "the plan is for EP size 4, --ep is 8"},
		"train percent":   {with("--train-percent", "0"), cli.ExitUsage, "allowed is 1 to 99"},
		"time budget":     {with("--time-budget", "-1s"), cli.ExitUsage, "must be at least 0"},
		"missing trace":   {with("--trace", filepath.Join(dir, "none")), cli.ExitInvalidFile, "no such file"},
		"bad trace":       {with("--trace", bad), cli.ExitInvalidFile, "bad.safetensors"},
		"a directory":     {with("--trace", dir), cli.ExitInvalidFile, "is a directory"},
		"out is taken":    {with("--out", dir), cli.ExitUsage, "contains no plan"},
		"taken, no trace": {with("--out", dir, "--trace", filepath.Join(dir, "none")), cli.ExitUsage, "--out: " + dir + " is not empty and contains no plan: use another directory"},
		"out in a file":   {with("--out", filepath.Join(bad, "plan")), cli.ExitUsage, "--out: "},
	} {
		if code, _, message := clitest.RunJSON(t, newSolveCommand(), test.args...); code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, test.code, test.want)
		}
	}
}

func TestEvalExitCodes(t *testing.T) {
	path := clitest.SmallTrace(t)
	tp, _ := solved(t, "tp", "--trace", path)
	dp, _ := solved(t, "dp", "--trace", path)
	damaged, _ := solved(t, "dp", "--trace", path)
	if err := os.WriteFile(filepath.Join(damaged, "placement.json"), []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	with := func(dir string, flags ...string) []string {
		return append([]string{"--trace", path, "--plan", dir}, flags...)
	}
	for _, args := range [][]string{with(dp, "--shards", "equal"), with(tp, "--policy", "price", "--cap", "1.150", "--orders", "5")} {
		if code, _, message := clitest.RunJSON(t, newEvalCommand(), args...); code != 0 {
			t.Errorf("%v: exit code %d, %q: explicit defaults are valid for every plan", args, code, message)
		}
	}
	for name, test := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no trace":       {[]string{"--plan", dp}, cli.ExitUsage, "--trace is missing"},
		"no plan":        {[]string{"--trace", path}, cli.ExitUsage, "--plan is missing"},
		"requests":       {with(dp, "--requests", "some"), cli.ExitUsage, "allowed is test, all"},
		"policy":         {with(dp, "--policy", "fair"), cli.ExitUsage, "allowed is price"},
		"cap":            {with(dp, "--cap", "0.5"), cli.ExitUsage, "at least 1"},
		"orders":         {with(dp, "--orders", "0"), cli.ExitUsage, "allowed is 1 to 1000"},
		"held":           {with(dp, "--policy", "late", "--held", "-1"), cli.ExitUsage, "--held is -1; allowed is 0 to 1024"},
		"many held":      {with(dp, "--policy", "late", "--held", "1025"), cli.ExitUsage, "--held is 1025; allowed is 0 to 1024"},
		"held at once":   {with(dp, "--held", "8"), cli.ExitUsage, "--held does not apply with --policy price; it requires late"},
		"held, tp":       {with(tp, "--policy", "late", "--held", "8"), cli.ExitUsage, "does not apply to this plan"},
		"late turns":     {with(dp, "--policy", "late", "--workload", "multi-turn"), cli.ExitUsage, "--workload multi-turn requires a policy that keeps the order"},
		"many orders":    {with(dp, "--orders", "1000000000"), cli.ExitUsage, "--orders is 1000000000; allowed is 1 to 1000"},
		"batch":          {with(tp, "--batch-tokens", "0"), cli.ExitUsage, "allowed is 1 to "},
		"shards":         {with(tp, "--shards", "some"), cli.ExitUsage, "allowed is equal, free"},
		"node":           {with(tp, "--ranks-per-node", "0"), cli.ExitUsage, "at least 1"},
		"forecast":       {with(tp, "--forecast", "prefill"), cli.ExitUsage, "this plan contains the tables of table"},
		"policy with tp": {with(tp, "--policy", "masked"), cli.ExitUsage, "does not apply to this plan"},
		"shards with dp": {with(dp, "--shards", "free"), cli.ExitUsage, "does not apply to this plan"},
		"damaged plan":   {with(damaged), cli.ExitInvalidFile, "placement.json is damaged"},
		"missing plan":   {with(filepath.Join(dp, "none")), cli.ExitInvalidFile, "manifest.json is missing"},
		"missing trace":  {with(dp, "--trace", "none"), cli.ExitInvalidFile, "no such file"},
		"hardware":       {with(dp, "--hardware", "abacus"), cli.ExitUsage, "--hardware: there is no built-in hardware profile"},
	} {
		if code, _, message := clitest.RunJSON(t, newEvalCommand(), test.args...); code != test.code || !strings.Contains(message, test.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", name, code, message, test.code, test.want)
		}
	}
}

// eval builds other workloads from the trace, and returns an error for unsupported combinations.
func TestEvalWorkloads(t *testing.T) {
	path := partOfSample(t, samplePart)
	dir, _ := samplePlan(t, "dp")
	for _, workload := range []string{"shared-prefix", "multi-turn"} {
		code, got, message := clitest.RunJSON(t, newEvalCommand(), "--trace", path, "--plan", dir, "--workload", workload, "--score-percent", "10", "--weights", "load=0", "--orders", "2")
		if code != 0 {
			t.Fatalf("%s: exit code %d: %s", workload, code, message)
		}
		for _, field := range []string{"lar", "window_imbalance", "reuse", "partial_scores", "decision"} {
			if got[field] == nil {
				t.Errorf("%s: eval does not print %s", workload, field)
			}
		}
	}
	for _, args := range [][]string{{"--workload", "chat"}, {"--weights", "speed=1"}, {"--weights", "wait=1"}, {"--cache-tokens", "0"}, {"--score-percent", "101"}} {
		if code, _, message := clitest.RunJSON(t, newEvalCommand(), append([]string{"--trace", path, "--plan", dir}, args...)...); code != cli.ExitUsage || !strings.Contains(message, args[0]) {
			t.Errorf("%v: exit code %d: %s", args, code, message)
		}
	}
}

// The number of copies is chosen from memory, printed, and stored in the plan with the compared numbers.
func TestSolveChoosesCopies(t *testing.T) {
	path := partOfSample(t, 4)
	const expertBytes, layers = 3 * 128 * 64 * 4, 2
	flags := []string{"--trace", path, "--redundant-slots", "auto", "--redundant-memory", "4MiB", "--batch-tokens", "1048576", "--time-budget", "0"}
	dir, report := solved(t, "dp", flags...)
	p, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if p.Copies == nil || p.Copies.MaxSlots != (4<<20)/(expertBytes*layers) || p.Copies.Chosen < 1 || p.Placement.SlotsPerRank != 8+p.Copies.Chosen {
		t.Fatalf("the plan has %d slots on a rank, and %+v", p.Placement.SlotsPerRank, p.Copies)
	}
	text, err := json.Marshal(p.Copies)
	if err != nil {
		t.Fatal(err)
	}
	var want any
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, report["copies"]); diff != "" {
		t.Errorf("the copies in the plan and in the output differ (-plan +printed):\n%s", diff)
	}
	var table bytes.Buffer
	if err := (&solveReport{Copies: p.Copies}).table(&table); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{p.Copies.Text(), fmt.Sprintf("\n%d *", p.Copies.Chosen), "\n0  ", "3.9 MiB"} {
		if !strings.Contains(table.String(), row) {
			t.Errorf("the table lacks %q:\n%s", row, table.String())
		}
	}
}
