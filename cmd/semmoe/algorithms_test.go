package main

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/solver/placement"
)

// schemaNode is a part of the schema of a CRD.
type schemaNode struct {
	Properties map[string]schemaNode
	Enum       []placement.Algorithm
}

// TestAPIAcceptsEveryAlgorithm compares the enumeration in the CRD with the allowed names of --algorithm.
func TestAPIAcceptsEveryAlgorithm(t *testing.T) {
	data, err := os.ReadFile("../../config/crd/semmoe.io_placementplans.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct{ OpenAPIV3Schema schemaNode }
			}
		}
	}
	if err := yaml.Unmarshal(data, &crd); err != nil {
		t.Fatal(err)
	}
	for _, version := range crd.Spec.Versions {
		algorithm := version.Schema.OpenAPIV3Schema.Properties["spec"].Properties["solver"].Properties["algorithm"]
		if diff := cmp.Diff(placement.Algorithms, algorithm.Enum); diff != "" {
			t.Error(diff)
		}
	}
	if len(crd.Spec.Versions) == 0 {
		t.Error("the CRD has no version")
	}
}
