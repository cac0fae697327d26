// SPDX-License-Identifier: Apache-2.0

package bundle_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/storetest"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
	"github.com/semmoe/operator/test/poll"
	"github.com/semmoe/operator/test/tier"
)

var environment *storetest.Environment

func TestMain(m *testing.M) {
	if flag.Parse(); flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(m.Run()) // fuzz targets need no store; every worker would start one
	}
	var err error
	if environment, err = storetest.Start(context.Background()); err != nil {
		os.Exit(tier.ExitCode(err))
	}
	code := m.Run()
	environment.Stop() //nolint:errcheck // the processes end with this one
	os.Exit(code)
}

// model returns the model of the test plans: one dense layer followed by three MoE layers.
func model() checkpoint.Report {
	return checkpoint.Report{ModelDigest: strings.Repeat("ab", 32), Experts: 16, ExpertsPerToken: 2, Layers: 4, MoELayers: []int{1, 2, 3}}
}

// encoded returns a plan for the model on four ranks.
func encoded(t *testing.T, seed uint64) *plan.Artifact {
	t.Helper()
	recorded := tracetest.Generate(tracetest.Small, seed)
	recorded.Model.Digest = model().ModelDigest
	s, err := solver.Solve(t.Context(), recorded, solver.Options{
		Ranks: 4, Attention: placement.DataParallel, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 80, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	a, err := plan.Encode(s.Plan)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// corrupt changes a byte of a file.
func corrupt(t *testing.T, path string) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	content[len(content)/2] ^= 1
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestFetchReturnsWhatWasPublished(t *testing.T) {
	store := environment.Run(t)
	client, ctx := store.Client(t), t.Context()
	a, dir := encoded(t, 1), filepath.Join(t.TempDir(), "plans", "one")
	if err := bundle.Fetch(ctx, client, "team-a", a.Digest, dir); !errors.Is(err, artifact.ErrNotFound) {
		t.Fatalf("plan that is not in the store: error = %v", err)
	}
	for range 2 { // publishing twice is a no-op
		if err := bundle.Publish(ctx, client, "team-a", a, strings.NewReader("words")); err != nil {
			t.Fatal(err)
		}
	}
	if err := bundle.Fetch(ctx, client, "team-b", a.Digest, dir); !errors.Is(err, artifact.ErrNotFound) {
		t.Errorf("plan of another namespace: error = %v", err)
	}
	check := func() {
		t.Helper()
		if err := bundle.Fetch(ctx, client, "team-a", a.Digest, dir); err != nil {
			t.Fatal(err)
		}
		_, got, err := plan.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(a, got); diff != "" {
			t.Errorf("the plan changed (-published +fetched):\n%s", diff)
		}
		if words, err := os.ReadFile(filepath.Join(dir, bundle.TokenizerFile)); err != nil || string(words) != "words" {
			t.Errorf("tokenizer %q, %v", words, err)
		}
	}
	check()
	for _, file := range []string{plan.TablesFile, "engine/sglang.json", bundle.TokenizerFile, bundle.File} {
		corrupt(t, filepath.Join(dir, file))
		check()
	}
	if err := os.Remove(filepath.Join(dir, plan.PlacementFile)); err != nil {
		t.Fatal(err)
	}
	for _, left := range []string{dir + ".part", filepath.Join(dir+".part.old", "engine")} { // left by a killed process
		if err := os.MkdirAll(left, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	check()

	store.Stop() // a complete plan needs no store
	check()
	if entries, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(entries) != 1 {
		t.Errorf("remaining files: %v, error %v", entries, err)
	}
}

func TestFetchWithoutStoreLeavesTheDirectory(t *testing.T) {
	store := environment.Run(t)
	client, ctx := store.Client(t), t.Context()
	a, dir := encoded(t, 1), filepath.Join(t.TempDir(), "plan")
	if err := errors.Join(bundle.Publish(ctx, client, "team-a", a, nil), bundle.Fetch(ctx, client, "team-a", a.Digest, dir)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, bundle.TokenizerFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("tokenizer that was not published: error = %v", err)
	}
	corrupt(t, filepath.Join(dir, plan.TablesFile))
	store.Stop()
	if err := bundle.Fetch(ctx, client, "team-a", a.Digest, dir); err == nil {
		t.Error("Fetch of a damaged plan succeeded without a store")
	}
	store.Start(t)
	if err := bundle.Fetch(ctx, client, "team-a", a.Digest, dir); err != nil {
		t.Error(err)
	}
	if err := bundle.Fetch(ctx, client, "team-a", "short", dir); err == nil || !strings.Contains(err.Error(), "plan digest") {
		t.Errorf("malformed digest: error = %v", err)
	}
}

func TestIncompletePlansAreFoundAndRepaired(t *testing.T) {
	store := environment.Run(t)
	client, ctx := store.Client(t), t.Context()
	a := encoded(t, 1)
	expect := func(want bool) {
		t.Helper()
		if got, err := bundle.Complete(ctx, client, "team-a", a.Digest); err != nil || got != want {
			t.Fatalf("complete: %t, %v; want %t", got, err, want)
		}
	}
	expect(false)
	if err := bundle.Publish(ctx, client, "team-a", a, nil); err != nil {
		t.Fatal(err)
	}
	expect(true)
	scope, err := bundle.Scope("team-a", a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	files, err := client.List(ctx, scope)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if string(file.Digest) == a.Manifest.Files[plan.TablesFile] {
			if err := client.Delete(ctx, file); err != nil {
				t.Fatal(err)
			}
		}
	}
	expect(false)
	publish := func() {
		t.Helper()
		if err := bundle.Publish(ctx, client, "team-a", a, nil); err != nil {
			t.Fatal(err)
		}
		expect(true)
	}
	publish()

	// A damaged list is detected at once; another damaged file is detected when it is read.
	digest, err := client.Published(ctx, scope)
	if err != nil {
		t.Fatal(err)
	}
	store.Damage(t, scope, digest)
	expect(false)
	publish()
	store.Damage(t, scope, artifact.Digest(a.Manifest.Files[plan.TablesFile]))
	if err := bundle.Fetch(ctx, client, "team-a", a.Digest, t.TempDir()); !errors.Is(err, artifact.ErrCorrupt) {
		t.Errorf("error %v, want %v", err, artifact.ErrCorrupt)
	}
	poll.Until(t, "the store has read the damaged file again", func() bool {
		complete, err := bundle.Complete(ctx, client, "team-a", a.Digest)
		if err != nil {
			t.Fatal(err)
		}
		return !complete
	})
	publish()
}

// TestForeignListsAreRefused checks that lists of another writer are rejected, in particular file names outside the
// directory.
func TestForeignListsAreRefused(t *testing.T) {
	client, ctx := environment.Run(t).Client(t), t.Context()
	a := encoded(t, 1)
	for name, text := range map[string]string{
		"text":         `not JSON`,
		"format":       `{"format":"semmoe-bundle/2"}`,
		"other plan":   `{"format":"semmoe-bundle/1","planDigest":"` + strings.Repeat("0", 64) + `"}`,
		"no manifest":  `{"format":"semmoe-bundle/1","planDigest":"` + a.Digest + `"}`,
		"parent":       `{"format":"semmoe-bundle/1","planDigest":"` + a.Digest + `","files":{"manifest.json":"` + a.Digest + `","../evil":"` + a.Digest + `"}}`,
		"absolute":     `{"format":"semmoe-bundle/1","planDigest":"` + a.Digest + `","files":{"manifest.json":"` + a.Digest + `","/evil":"` + a.Digest + `"}}`,
		"digest":       `{"format":"semmoe-bundle/1","planDigest":"` + a.Digest + `","files":{"manifest.json":"` + a.Digest + `","x":"y"}}`,
		"missing file": `{"format":"semmoe-bundle/1","planDigest":"` + a.Digest + `","files":{"manifest.json":"` + a.Digest + `"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			namespace := "ns-" + strings.ReplaceAll(name, " ", "-")
			scope, err := bundle.Scope(namespace, a.Digest)
			if err != nil {
				t.Fatal(err)
			}
			for _, content := range [][]byte{a.Files[plan.ManifestFile], []byte(text)} {
				digest, err := client.Put(ctx, scope, bytes.NewReader(content))
				if err == nil && string(content) == text {
					_, err = client.Publish(ctx, scope, digest)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			parent := t.TempDir()
			if err := bundle.Fetch(ctx, client, namespace, a.Digest, filepath.Join(parent, "plan")); err == nil {
				t.Error("fetched")
			}
			if entries, err := os.ReadDir(parent); err != nil || len(entries) != 0 {
				t.Errorf("remaining files: %v, error %v", entries, err)
			}
		})
	}
}

func TestConfigMapData(t *testing.T) {
	client, ctx := environment.Run(t).Client(t), t.Context()
	a := encoded(t, 1)
	if err := bundle.Publish(ctx, client, "team-a", a, strings.NewReader("words")); err != nil {
		t.Fatal(err)
	}
	want, err := bundle.ConfigMapData(a, "SGLang")
	if err != nil {
		t.Fatal(err)
	}
	for key, file := range map[string]string{
		"manifest.json": plan.ManifestFile, "placement.json": plan.PlacementFile, "gate-permutation.json": plan.GatePermutationFile, "sglang.json": "engine/sglang.json",
	} {
		if want[key] != string(a.Files[file]) {
			t.Errorf("%s is %q", key, want[key])
		}
	}
	if len(want) != 4 {
		t.Errorf("%d keys", len(want))
	}
	layout, err := bundle.FetchLayout(ctx, client, "team-a", a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	got, err := bundle.ConfigMapData(layout, "SGLang")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("plan from the store (-solved +fetched):\n%s", diff)
	}

	if _, err := bundle.ConfigMapData(a, "Other"); err == nil || !strings.Contains(err.Error(), `"Other"`) {
		t.Errorf("unknown engine: error = %v", err)
	}
	for engine, keys := range map[string]string{
		"VLLM":        "gate-permutation.json manifest.json placement.json",
		"VLLMAscend":  "gate-permutation.json manifest.json placement.json vllm-ascend.json",
		"TensorRTLLM": "gate-permutation.json manifest.json placement.json trtllm.yaml",
	} {
		data, err := bundle.ConfigMapData(a, engine)
		if got := strings.Join(slices.Sorted(maps.Keys(data)), " "); err != nil || got != keys {
			t.Errorf("%s: keys %s, error %v", engine, got, err)
		}
	}
	for _, name := range []string{plan.DriftFile, plan.ScheduleFile} {
		for size, holds := range map[int]bool{1000: true, 900 << 10: false} {
			a.Files[name] = bytes.Repeat([]byte(" "), size)
			data, err := bundle.ConfigMapData(a, "SGLang")
			if _, has := data[name]; err != nil || has != holds || len(data) != 4+map[bool]int{true: 1}[holds] {
				t.Errorf("%s of %d bytes: present = %v, %d keys, error %v", name, size, has, len(data), err)
			}
		}
		delete(a.Files, name)
	}
	a.Files[plan.DriftFile], a.Files[plan.ScheduleFile] = bytes.Repeat([]byte(" "), 500<<10), bytes.Repeat([]byte(" "), 500<<10)
	data, err := bundle.ConfigMapData(a, "SGLang")
	if _, has := data[plan.ScheduleFile]; err != nil || has || data[plan.DriftFile] == "" {
		t.Errorf("space for one of two files: %d keys, error %v", len(data), err)
	}
	delete(a.Files, plan.DriftFile)
	delete(a.Files, plan.ScheduleFile)
	permutation := a.Files[plan.GatePermutationFile]
	delete(a.Files, plan.GatePermutationFile)
	if _, err := bundle.ConfigMapData(a, "VLLM"); err == nil || !strings.Contains(err.Error(), "redundant experts") {
		t.Errorf("no map and no permutation: error = %v", err)
	}
	a.Files[plan.GatePermutationFile] = permutation
	a.Files[plan.PlacementFile] = bytes.Repeat([]byte(" "), 900<<10)
	if _, err := bundle.ConfigMapData(a, "SGLang"); err == nil || !strings.Contains(err.Error(), "ConfigMap may contain at most 921600") {
		t.Errorf("placement of 900 KiB: error = %v", err)
	}
}
