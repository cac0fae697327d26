package api

import (
	"os"
	"path/filepath"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Every sample is accepted as it stands, without a field that is misspelled.
func TestSamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "config", "samples", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d samples, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		sample := object(t, string(text))
		if sample.GetNamespace() == "" {
			sample.SetNamespace("default")
		}
		if err := api.Create(t.Context(), sample, client.DryRunAll); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
