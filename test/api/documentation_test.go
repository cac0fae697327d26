package api

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/markdown"
)

// bases are what the parts of objects that the documentation shows are put into.
var bases = map[string]string{
	"MoEDeployment": minimal,
	"AffinityProfile": `
apiVersion: semmoe.io/v1alpha1
kind: AffinityProfile
metadata: {name: NAME, namespace: default}
spec:
  model: {volume: {hostPath: {path: /srv/m}}}
  engine: {image: "engine:1"}
  parallelism: {expertParallelSize: 4}
`,
	"PlacementPlan": `
apiVersion: semmoe.io/v1alpha1
kind: PlacementPlan
metadata: {name: NAME, namespace: default}
spec: {expertParallelSize: 8}
`,
}

// kindsOfParts are the kinds that documents show a spec of; other parts are fields of a spec of a MoEDeployment.
var kindsOfParts = map[string]string{"gitops.md": "MoEDeployment", "planning.md": "PlacementPlan", "profiling.md": "AffinityProfile"}

// foreign are the first lines of what is written in YAML and is for others.
var foreign = []string{"apiVersion: gateway.networking.k8s.io/v1", "enable_attention_dp: true", "grpc_service:"}

// Every object of ours that the documentation shows is accepted, and so is every part of one.
func TestDocumentation(t *testing.T) {
	var files []string
	for _, pattern := range []string{"README.md", "docs/*.md", "docs/*/*.md", "charts/*/README.md", "test/*/README.md"} {
		found, err := filepath.Glob(filepath.Join("..", "..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	tried := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range markdown.Blocks(string(text)) {
			if block.Language != "yaml" || isForeign(block.Text) {
				continue
			}
			tried++
			shown, err := complete(filepath.Base(file), block.Text)
			if err == nil {
				err = api.Create(t.Context(), shown, client.DryRunAll)
			}
			if err != nil {
				t.Errorf("%s, line %d: %v", file, block.Line, err)
			}
		}
	}
	if tried < 8 {
		t.Errorf("%d examples in %d files: some are not found", tried, len(files))
	}
}

// The README shows the sample that its commands apply, but for comments.
func TestReadmeShowsTheSample(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	sample, err := os.ReadFile(filepath.Join("..", "..", "config", "samples", "moedeployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var shown, applied map[string]any
	for _, block := range markdown.Blocks(string(readme)) {
		if block.Language == "yaml" {
			err = errors.Join(err, yaml.UnmarshalStrict([]byte(block.Text), &shown))
		}
	}
	if err := errors.Join(err, yaml.UnmarshalStrict(sample, &applied)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(applied, shown); diff != "" {
		t.Errorf("README.md does not show config/samples/moedeployment.yaml (-sample +README):\n%s", diff)
	}
	if !strings.Contains(string(readme), "kubectl apply -f config/samples/moedeployment.yaml") {
		t.Error("README.md does not apply config/samples/moedeployment.yaml")
	}
}

func isForeign(block string) bool {
	for _, first := range foreign {
		if strings.HasPrefix(block, first) {
			return true
		}
	}
	return false
}

// complete makes an object of what a document shows of one.
func complete(document, block string) (*unstructured.Unstructured, error) {
	block = strings.ReplaceAll(block, "…", strings.Repeat("0", 48)) // the rest of a digest
	shown := &unstructured.Unstructured{}
	if err := yaml.UnmarshalStrict([]byte(block), &shown.Object); err != nil {
		return nil, err
	}
	if shown.GetAPIVersion() == semmoev1.GroupVersion.String() {
		shown.SetNamespace("default")
		return shown, nil
	}
	kind, spec := "MoEDeployment", shown.Object
	if part, ok := spec["spec"].(map[string]any); ok && len(spec) == 1 {
		if kind = kindsOfParts[document]; kind == "" {
			return nil, fmt.Errorf("%s shows a spec without its kind", document)
		}
		spec = part
	}
	whole := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(strings.Replace(bases[kind], "NAME", "shown", 1)), &whole.Object); err != nil {
		return nil, err
	}
	for field, value := range spec {
		whole.Object["spec"].(map[string]any)[field] = value
	}
	return whole, nil
}
