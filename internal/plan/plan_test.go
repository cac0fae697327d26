// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// small caches encoded plans. Solving is slow, and most tests need any plan.
var small sync.Map

// solved returns a small plan of either attention mode. Its model has one dense layer followed by three MoE layers.
// Each call returns a new plan.
func solved(t testing.TB, attention placement.Attention) *solver.Plan {
	t.Helper()
	a, known := small.Load(attention)
	if !known {
		a, _ = small.LoadOrStore(attention, encode(t, solve(t, attention, solver.Table)))
	}
	p, err := plan.Decode(a.(*plan.Artifact))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func solve(t testing.TB, attention placement.Attention, by solver.Forecast) *solver.Plan {
	t.Helper()
	tr := tracetest.Generate(tracetest.Small, 1)
	if by == solver.LookAhead || by == solver.RawLookAhead {
		tracetest.AddLookAhead(tr, 6, 20, 1)
	}
	s, err := solver.Solve(t.Context(), tr, solver.Options{
		Ranks: 4, Attention: attention, Algorithm: placement.RoundRobinAlgorithm, Forecast: by, TrainPercent: 20, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s.Plan
}

func encode(t testing.TB, p *solver.Plan) *plan.Artifact {
	t.Helper()
	a, err := plan.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// written returns a directory with the plan.
func written(t *testing.T, p *solver.Plan) (string, *plan.Artifact) {
	t.Helper()
	dir, a := filepath.Join(t.TempDir(), "parent", "plan"), encode(t, p)
	if err := plan.Write(dir, a, []byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	return dir, a
}

func TestReadReturnsWhatWasWritten(t *testing.T) {
	for _, want := range []*solver.Plan{
		solve(t, placement.DataParallel, solver.Table), solve(t, placement.TensorParallel, solver.Table),
		solve(t, placement.TensorParallel, solver.Prefill), solve(t, placement.TensorParallel, solver.Decode),
		solve(t, placement.TensorParallel, solver.Transition), solve(t, placement.TensorParallel, solver.LookAhead),
		solve(t, placement.TensorParallel, solver.RawLookAhead), solve(t, placement.TensorParallel, solver.LookBack),
	} {
		dir, a := written(t, want)
		got, read, err := plan.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s %s: plan changed (-want +got):\n%s", want.Attention, want.Forecast, diff)
		}
		if diff := cmp.Diff(a, read); diff != "" {
			t.Errorf("%s %s: artifact changed (-want +got):\n%s", want.Attention, want.Forecast, diff)
		}
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), ".plan-*")); left != nil {
			t.Errorf("remaining temporary directories: %v", left)
		}
	}
}

func TestSamePlanSameBytes(t *testing.T) {
	first, again := encode(t, solve(t, placement.TensorParallel, solver.Table)), encode(t, solve(t, placement.TensorParallel, solver.Table))
	if diff := cmp.Diff(first, again); diff != "" {
		t.Error(diff)
	}
	if len(first.Digest) != 64 || first.Digest == first.Manifest.LayoutDigest {
		t.Errorf("plan digest %s, layout digest %s", first.Digest, first.Manifest.LayoutDigest)
	}
	other := solved(t, placement.TensorParallel)
	other.Tokens.Score[0] ^= 1
	changed := encode(t, other)
	if changed.Digest == first.Digest || changed.Manifest.LayoutDigest != first.Manifest.LayoutDigest {
		t.Error("new tables must change the plan digest and keep the layout digest")
	}
}

func TestReportIsNotPartOfThePlan(t *testing.T) {
	dir, a := written(t, solved(t, placement.DataParallel))
	if err := os.WriteFile(filepath.Join(dir, plan.ReportFile), []byte(`{"seconds":1}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, read, err := plan.Read(dir); err != nil || read.Digest != a.Digest {
		t.Errorf("digest %v, error %v", read, err)
	}
}

// TestFlippedByteIsNamed damages every file of a plan in several places.
func TestFlippedByteIsNamed(t *testing.T) {
	dir, a := written(t, solved(t, placement.TensorParallel))
	for name := range a.Manifest.Files {
		path := filepath.Join(dir, name)
		content := a.Files[name]
		for _, at := range []int{0, len(content) / 3, len(content) - 1} {
			damaged := append([]byte(nil), content...)
			damaged[at] ^= 1
			if err := os.WriteFile(path, damaged, 0o644); err != nil {
				t.Fatal(err)
			}
			if _, _, err := plan.Read(dir); !plan.IsInvalid(err) || !strings.Contains(err.Error(), name+" is damaged") {
				t.Errorf("%s, byte %d: error %v", name, at, err)
			}
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := plan.Read(dir); err != nil {
		t.Errorf("restored plan: error = %v", err)
	}
}

func TestReadRefuses(t *testing.T) {
	manifest := func(change func(m map[string]any)) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, plan.ManifestFile)
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var m map[string]any
			if err := json.Unmarshal(content, &m); err != nil {
				t.Fatal(err)
			}
			change(m)
			if content, err = json.Marshal(m); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, content, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	set := func(key string, value any) func(t *testing.T, dir string) {
		return manifest(func(m map[string]any) { m[key] = value })
	}
	remove := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, test := range map[string]struct {
		change func(t *testing.T, dir string)
		want   string
	}{
		"no manifest":       {remove(plan.ManifestFile), "manifest.json is missing"},
		"no tables":         {remove(plan.TablesFile), "tables.safetensors is missing"},
		"no engine map":     {remove("engine/sglang.json"), "engine/sglang.json is missing"},
		"other format":      {set("format", "semmoe-plan/9"), `this version reads "semmoe-plan/1"`},
		"unknown field":     {set("created", "now"), "created"},
		"no seed":           {set("seed", -1), "seed"},
		"other attention":   {set("attention", "tp"), "token_rank"},
		"no attention":      {set("attention", "both"), "token_rank"},
		"unknown forecast":  {set("forecast", "oracle"), `forecast "oracle" is unknown`},
		"unknown algorithm": {set("algorithm", "magic"), `algorithm "magic" is unknown`},
		"few layers":        {set("hidden_layers", 3), "hidden_layers is 3"},
		"other vocabulary":  {set("vocab_size", 7), "has shape [200 4]"},
		"train percent":     {set("train_percent", 0), "train_percent is 0"},
		"layout digest":     {set("layout_digest", "00"), "layout_digest is 00"},
		"trace digest":      {set("trace_digest", "00"), `trace_digest is "00"`},
		"file not listed":   {manifest(func(m map[string]any) { delete(m["files"].(map[string]any), plan.PlacementFile) }), "placement.json is not listed"},
		"foreign file":      {manifest(func(m map[string]any) { m["files"].(map[string]any)["../../etc/passwd"] = "00" }), "is not a file of a plan"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, _ := written(t, solved(t, placement.DataParallel))
			test.change(t, dir)
			if _, _, err := plan.Read(dir); !plan.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v; want %q", err, test.want)
			}
		})
	}
	if _, _, err := plan.Read(filepath.Join(t.TempDir(), "nowhere")); !plan.IsInvalid(err) {
		t.Errorf("error %v", err)
	}
}

func TestWriteReplacesAPlanAndNothingElse(t *testing.T) {
	dir, first := written(t, solved(t, placement.DataParallel))
	second := encode(t, solved(t, placement.TensorParallel))
	if err := plan.Write(dir, second, []byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	if _, read, err := plan.Read(dir); err != nil || read.Digest != second.Digest || read.Digest == first.Digest {
		t.Errorf("error %v", err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(dir)); len(entries) != 1 {
		t.Errorf("remaining files: %v", entries)
	}
	other := t.TempDir()
	precious := filepath.Join(other, "thesis.txt")
	if err := os.WriteFile(precious, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := plan.Write(other, first, nil); err == nil || !strings.Contains(err.Error(), "contains no plan") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
	empty := t.TempDir()
	if err := plan.Write(empty, first, []byte("{}\n")); err != nil {
		t.Errorf("empty directory: error = %v", err)
	}
	t.Chdir(t.TempDir())
	if err := errors.Join(plan.CheckDirectory("."), plan.Write(".", first, []byte("{}\n"))); err != nil {
		t.Errorf("working directory: error = %v", err)
	}
}

// TestCheckReplaceable checks that a directory with other files is rejected with the name of such a file, and that a
// fetched plan is replaced.
func TestCheckReplaceable(t *testing.T) {
	manifest := `{"format":"semmoe-plan/0"}`
	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"a plan of another version":      {map[string]string{"manifest.json": manifest, "engine/sglang.json": ""}, ""},
		"a fetched plan":                 {map[string]string{"manifest.json": manifest, "bundle.json": "", "tokenizer.json": ""}, ""},
		"a fetched plan that is damaged": {map[string]string{"manifest.json": "?", "bundle.json": ""}, ""},
		"browser extension":              {map[string]string{"manifest.json": `{"manifest_version":3}`, "report.json": ""}, "contains no plan"},
		"a list":                         {map[string]string{"manifest.json": "[]"}, "contains no plan"},
		"no manifest":                    {map[string]string{"hardware.json": "{}"}, "contains no plan"},
		"file next to a plan":            {map[string]string{"manifest.json": manifest, "thesis.txt": ""}, "contains thesis.txt, which is not a file of a plan"},
		"a file among the maps":          {map[string]string{"manifest.json": manifest, "engine/mine.json": ""}, "contains engine/mine.json, which"},
		"a directory next to a plan":     {map[string]string{"bundle.json": "", "src/main.go": ""}, "contains src, which"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, content := range test.files {
				path := filepath.Join(dir, file)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			err := plan.CheckReplaceable(dir)
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("error %v; want %q", err, test.want)
			}
		})
	}
}

// TestCheckDirectory checks that an invalid directory is rejected before a plan is solved, and that no directory is
// changed.
func TestCheckDirectory(t *testing.T) {
	dir, a := written(t, solved(t, placement.DataParallel))
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	empty := t.TempDir()
	for name, test := range map[string]struct{ dir, want string }{
		"a plan":          {dir, ""},
		"an empty one":    {empty, ""},
		"a new one":       {filepath.Join(empty, "plan"), ""},
		"in a new one":    {filepath.Join(empty, "a", "b", "plan"), ""},
		"other files":     {filepath.Dir(file), "is not empty and contains no plan: use another directory"},
		"a file":          {file, "not a directory"},
		"below a file":    {filepath.Join(file, "plan"), "not a directory"},
		"the root":        {"/", "is not empty and contains no plan"},
		"a read-only one": {"/proc/plan", "failed to create a directory next to the plan, which is needed for an atomic replacement: mkdir /proc/.plan-"},
	} {
		if runtime.GOOS != "linux" && strings.HasPrefix(test.dir, "/proc") {
			continue
		}
		err := plan.CheckDirectory(test.dir)
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	if _, read, err := plan.Read(dir); err != nil || read.Digest != a.Digest {
		t.Errorf("existing plan: error = %v", err)
	}
	for _, parent := range []string{filepath.Dir(dir), filepath.Dir(empty), empty, filepath.Dir(file)} {
		if left, _ := filepath.Glob(filepath.Join(parent, ".plan-*")); len(left) > 0 {
			t.Errorf("remaining files: %v", left)
		}
	}
}

func TestEncodeRefusesInconsistentPlans(t *testing.T) {
	for name, test := range map[string]struct {
		change func(p *solver.Plan)
		want   string
	}{
		"placement":   {func(p *solver.Plan) { p.Placement.Layers[0].Slots[0] = 99 }, "expert 99"},
		"no tables":   {func(p *solver.Plan) { p.Ranks = nil }, "must contain exactly the tables"},
		"both tables": {func(p *solver.Plan) { p.Tokens = &affinity.TokenTable{} }, "must contain exactly the tables"},
		"attention":   {func(p *solver.Plan) { p.Attention = "x" }, `attention is "x"`},
		"layers":      {func(p *solver.Plan) { p.HiddenLayers = 1 }, "hidden_layers is 1"},
		"forecast":    {func(p *solver.Plan) { p.Forecast = solver.Transition }, "forecast transition is for attention tp"},
		"vocabulary":  {func(p *solver.Plan) { p.Vocabulary = 0 }, "vocab_size is 0"},
		"shape":       {func(p *solver.Plan) { p.Shape.HiddenSize = -1 }, "hidden_size and active_parameters are 2, -1"},
		"objective":   {func(p *solver.Plan) { p.Objective = "dedup" }, `objective "dedup" is unknown`},
		"nodes":       {func(p *solver.Plan) { p.Objective = placement.NodeDedup }, "0 ranks per node"},
		"capacities":  {func(p *solver.Plan) { p.RankCapacity = []float64{1} }, "rank_capacity: 1 rank capacities for 4 ranks"},
	} {
		p := solved(t, placement.DataParallel)
		test.change(p)
		if _, err := plan.Encode(p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
}

// TestObjectiveAndCapacityAreKept checks that objective and capacities are restored, and that a plan for activations
// with equal shares omits them.
func TestObjectiveAndCapacityAreKept(t *testing.T) {
	p := solved(t, placement.TensorParallel)
	if text := string(encode(t, p).Files[plan.ManifestFile]); strings.Contains(text, "objective") || strings.Contains(text, "capacity") {
		t.Errorf("manifest %s", text)
	}
	p.Objective, p.RanksPerNode, p.RankCapacity = placement.Hierarchical, 2, []float64{1, 2, 0.5, 1}
	dir, _ := written(t, p)
	got, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(p, got); diff != "" {
		t.Error(diff)
	}
}

// TestDecodeRefusesOtherForecasts checks that inconsistent tables with valid digests are rejected.
func TestDecodeRefusesOtherForecasts(t *testing.T) {
	prefill := solve(t, placement.TensorParallel, solver.Prefill)
	for name, test := range map[string]struct {
		change func(m *forecast.Model)
		want   string
	}{
		"a weight":     {func(m *forecast.Model) { m.Bias[0] = float32(math.NaN()) }, "a weight of the forecast is NaN"},
		"a level":      {func(m *forecast.Model) { m.TokenLevel[3] = 200 }, "token 3 has level 200"},
		"pairs":        {func(m *forecast.Model) { m.PairStart[1] = 1 << 30 }, "do not ascend"},
		"missing rows": {func(m *forecast.Model) { m.Expert = m.Expert[1:] }, "weights do not match"},
		"no ranks":     {func(m *forecast.Model) { m.Ranks = 0 }, "does not match the token table"},
	} {
		p := *prefill
		m := *prefill.Context
		m.Bias, m.TokenLevel, m.PairStart = slices.Clone(m.Bias), slices.Clone(m.TokenLevel), slices.Clone(m.PairStart)
		test.change(&m)
		p.Context = &m
		if _, err := plan.Encode(&p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	ahead := solve(t, placement.TensorParallel, solver.LookAhead)
	for name, test := range map[string]struct {
		change func(m *forecast.LookAhead)
		want   string
	}{
		"a weight of the look-ahead": {func(m *forecast.LookAhead) { m.Slope = []float32{1, float32(math.Inf(1)), 1} }, "a weight of the look-ahead is +Inf"},
		"a narrow look-ahead":        {func(m *forecast.LookAhead) { m.Width = 1 }, "the look-ahead is for 3 layers and 1 most probable"},
		"short weights":              {func(m *forecast.LookAhead) { m.Gate = m.Gate[1:] }, "weights do not match"},
	} {
		p, m := *ahead, *ahead.LookAhead
		test.change(&m)
		p.LookAhead = &m
		if _, err := plan.Encode(&p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	p := *ahead
	p.LookAhead = nil
	if _, err := plan.Encode(&p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), "must contain exactly the tables of forecast lookahead") {
		t.Errorf("error %v", err)
	}
	back := solve(t, placement.TensorParallel, solver.LookBack)
	p = *back
	p.LookBack = nil
	if _, err := plan.Encode(&p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), "must contain exactly the tables of forecast lookback") {
		t.Errorf("error %v", err)
	}
	short := *back.LookBack
	short.Depth--
	p.LookBack = &short
	if _, err := plan.Encode(&p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), "the look-back has 3072 factors; 3 layers of 4 ranks need 768") {
		t.Errorf("error %v", err)
	}
	p = *prefill
	p.Context = nil
	if _, err := plan.Encode(&p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), "must contain exactly the tables of forecast prefill") {
		t.Errorf("error %v", err)
	}
}

// TestEngineFiles checks the expert maps against the placement. The formats are tested in the packages of the engines.
func TestEngineFiles(t *testing.T) {
	p := solved(t, placement.DataParallel)
	a := encode(t, p)
	var gate plan.GatePermutation
	for _, layer := range p.Placement.Layers {
		gate.Layers = append(gate.Layers, plan.LayerPermutation{Layer: layer.Layer, NewToOld: layer.Slots})
	}
	var gotGate plan.GatePermutation
	if err := json.Unmarshal(a.Files[plan.GatePermutationFile], &gotGate); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(gate, gotGate); diff != "" {
		t.Error(diff)
	}
	for _, name := range []string{"engine/sglang.json", "engine/vllm-ascend.json", "engine/trtllm.yaml"} {
		if isMap, err := plan.CheckMap(name, a.Files[name], p.Placement, p.HiddenLayers); !isMap || err != nil {
			t.Errorf("%s: map = %v, error %v", name, isMap, err)
		}
		other := encode(t, solved(t, placement.DataParallel)).Files[name]
		moved := solved(t, placement.DataParallel).Placement
		moved.Layers[1].Slots[0], moved.Layers[1].Slots[15] = moved.Layers[1].Slots[15], moved.Layers[1].Slots[0]
		if _, err := plan.CheckMap(name, other, moved, p.HiddenLayers); !plan.IsInvalid(err) || !strings.Contains(err.Error(), name+" does not place experts as placement.json does") {
			t.Errorf("%s of another placement: error %v", name, err)
		}
	}
	if isMap, err := plan.CheckMap(plan.TablesFile, nil, p.Placement, p.HiddenLayers); isMap || err != nil {
		t.Errorf("tables: map = %v, error %v", isMap, err)
	}
	// The reference engine reads the map of SGLang.
	shape := locality.Shape{Experts: 16, Ranks: 4, MoE: []bool{false, true, true, true}}
	if _, err := locality.Parse(string(a.Files["engine/sglang.json"]), shape); err != nil {
		t.Errorf("reference engine: %v", err)
	}
}

// TestReadRefusesAMapOfAnotherPlacement checks that a map of another placement with a valid digest is rejected.
func TestReadRefusesAMapOfAnotherPlacement(t *testing.T) {
	p := solved(t, placement.DataParallel)
	a := encode(t, p)
	moved := solved(t, placement.DataParallel)
	moved.Placement.Layers[0].Slots[0], moved.Placement.Layers[0].Slots[15] = moved.Placement.Layers[0].Slots[15], moved.Placement.Layers[0].Slots[0]
	a.Files["engine/trtllm.yaml"] = encode(t, moved).Files["engine/trtllm.yaml"]
	sum := sha256.Sum256(a.Files["engine/trtllm.yaml"])
	a.Manifest.Files["engine/trtllm.yaml"] = hex.EncodeToString(sum[:])
	manifest, err := json.Marshal(a.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	a.Files[plan.ManifestFile] = manifest
	dir := filepath.Join(t.TempDir(), "plan")
	if err := plan.Write(dir, a, []byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := plan.Read(dir); !plan.IsInvalid(err) || !strings.Contains(err.Error(), "engine/trtllm.yaml does not place") {
		t.Errorf("error %v", err)
	}
}

func TestRedundantPlansHaveNoGatePermutation(t *testing.T) {
	p := solved(t, placement.DataParallel)
	p.Placement.SlotsPerRank++
	for l, layer := range p.Placement.Layers {
		var slots []int
		for rank := range 4 {
			own := layer.Slots[rank*4 : (rank+1)*4]
			// One more copy of the first expert of the next rank.
			slots = append(append(slots, own...), layer.Slots[(rank+1)%4*4])
		}
		p.Placement.Layers[l].Slots = slots
	}
	dir, a := written(t, p)
	if _, has := a.Files[plan.GatePermutationFile]; has {
		t.Error("copies of experts are accepted as a permutation")
	}
	if _, _, err := plan.Read(dir); err != nil {
		t.Error(err)
	}
}

// TestChosenCopies checks that a plan records how its number of copies was chosen, and has this number.
func TestChosenCopies(t *testing.T) {
	p := solved(t, placement.DataParallel)
	p.Copies = &solver.Copies{MemoryBytes: 1 << 30, ExpertBytes: 1 << 20, Layers: 4, MaxSlots: 12, Points: []solver.CopyPoint{{LayerUS: 300, LAR: .25, ExpertImbalance: 1.25}}}
	dir, _ := written(t, p)
	read, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(p.Copies, read.Copies); diff != "" {
		t.Errorf("copies (-written +read):\n%s", diff)
	}
	p.Copies.Chosen = 1
	if _, err := plan.Encode(p); !plan.IsInvalid(err) || !strings.Contains(err.Error(), "copies has 1 redundant slots per rank") {
		t.Errorf("a number of copies that differs from the placement: error = %v", err)
	}
	p.Copies.Chosen, p.Copies.Points = 0, make([]solver.CopyPoint, 65)
	if _, err := plan.Encode(p); !plan.IsInvalid(err) {
		t.Errorf("too many compared numbers: error = %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	template := encode(f, solved(f, placement.DataParallel))
	for _, p := range []*solver.Plan{
		solved(f, placement.DataParallel), solved(f, placement.TensorParallel), solve(f, placement.TensorParallel, solver.Decode),
		solve(f, placement.TensorParallel, solver.LookAhead),
	} {
		a := encode(f, p)
		f.Add(string(p.Attention), string(p.Forecast), a.Files[plan.PlacementFile], a.Files[plan.TablesFile])
	}
	f.Fuzz(func(t *testing.T, attention, forecast string, placementJSON, tables []byte) {
		a := &plan.Artifact{Manifest: template.Manifest, Files: maps.Clone(template.Files)}
		a.Manifest.Attention, a.Manifest.Forecast = placement.Attention(attention), solver.Forecast(forecast)
		layout := sha256.Sum256(placementJSON)
		a.Manifest.LayoutDigest = hex.EncodeToString(layout[:])
		a.Files[plan.PlacementFile], a.Files[plan.TablesFile] = placementJSON, tables
		p, err := plan.Decode(a)
		if err != nil {
			if !plan.IsInvalid(err) {
				t.Fatalf("%v is not an *InvalidError", err)
			}
			return
		}
		if _, err := plan.Encode(p); err != nil {
			t.Fatalf("Encode of a decoded plan failed: %v", err)
		}
	})
}

// TestNewTablesNameTheLayoutTheyAreFor checks that new tables refer to the plan of the pods, also if they replace other
// new tables.
func TestNewTablesNameTheLayoutTheyAreFor(t *testing.T) {
	current := encode(t, solved(t, placement.DataParallel))
	first := solved(t, placement.DataParallel)
	first.Ranks.Score[0] ^= 1
	if err := plan.OnLayoutOf(first, current); err != nil {
		t.Fatal(err)
	}
	dir, a := written(t, first)
	read, _, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if read.Layout != current.Digest || a.Manifest.Layout != current.Digest || a.Digest == current.Digest {
		t.Errorf("plan %s has layout %q, read back %q; want %s", a.Digest, a.Manifest.Layout, read.Layout, current.Digest)
	}
	if a.Manifest.LayoutDigest != current.Manifest.LayoutDigest {
		t.Error("the placement changed")
	}
	second := solved(t, placement.DataParallel)
	if err := plan.OnLayoutOf(second, a); err != nil || second.Layout != current.Digest {
		t.Errorf("tables that replace tables: layout %q, error %v; want %s, the layout of the placement", second.Layout, err, current.Digest)
	}
	slots := second.Placement.Layers[0].Slots
	slots[0], slots[len(slots)-1] = slots[len(slots)-1], slots[0]
	if err := plan.OnLayoutOf(second, current); !plan.IsInvalid(err) {
		t.Errorf("other placement: error = %v", err)
	}
	for _, layout := range []string{"short", strings.Repeat("A", 64), strings.Repeat("g", 64), current.Digest + "0"} {
		first.Layout = layout
		if _, err := plan.Encode(first); err == nil || !strings.Contains(err.Error(), "layout is") {
			t.Errorf("layout %q: %v", layout, err)
		}
	}
}
