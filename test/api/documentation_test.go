// SPDX-License-Identifier: Apache-2.0

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

// bases are the objects into which the partial objects of the documentation are merged.
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

// kindsOfParts maps documents to the kind of the specs that they show. Other partial objects are fields of a
// MoEDeployment spec.
var kindsOfParts = map[string]string{"gitops.md": "MoEDeployment", "cluster-replanning.md": "PlacementPlan", "profiling.md": "AffinityProfile"}

// foreign contains the first lines of YAML blocks for other software, and of values of the chart.
var foreign = []string{"apiVersion: gateway.networking.k8s.io/v1", "enable_attention_dp: true", "grpc_service:", "monitoring:"}

// TestDocumentation checks that the API server accepts every complete or partial object of the operator's kinds in the
// documentation.
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
		t.Errorf("found only %d examples in %d files", tried, len(files))
	}
}

// TestReadmeSample checks that the README shows the sample that its commands apply, without comments.
func TestReadmeSample(t *testing.T) {
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

// complete returns the complete object for a block of a document.
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
