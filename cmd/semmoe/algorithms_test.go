// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
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

// TestAPIAcceptsAlgorithmsForProduction compares the enumeration in the CRD with the algorithms for production, which
// are values of --algorithm.
func TestAPIAcceptsAlgorithmsForProduction(t *testing.T) {
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
	want := []placement.Algorithm{placement.Auto, placement.Alternating, placement.CrossEntropy, placement.EPLB, placement.ContiguousAlgorithm}
	for _, algorithm := range want {
		if !slices.Contains(placement.Algorithms, algorithm) {
			t.Errorf("--algorithm has no value %s", algorithm)
		}
	}
	for _, version := range crd.Spec.Versions {
		algorithm := version.Schema.OpenAPIV3Schema.Properties["spec"].Properties["solver"].Properties["algorithm"]
		if diff := cmp.Diff(want, algorithm.Enum); diff != "" {
			t.Error(diff)
		}
	}
	if len(crd.Spec.Versions) == 0 {
		t.Error("the CRD has no version")
	}
}
