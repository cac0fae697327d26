// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/engine/registry"
)

// TestRoutesAreDocumented compares docs/routes.md with the tables from which make generate writes it.
func TestRoutesAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../../docs/routes.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), routeTable(registry.All())) {
		t.Error("docs/routes.md differs from the tables: run make generate")
	}
}

// TestMechanismsAreDocumented compares docs/engine-releases.md with the tables from which make generate writes it.
func TestMechanismsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../../docs/engine-releases.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, adapter := range registry.All() {
		if !strings.Contains(string(text), mechanismTable(adapter)) {
			t.Errorf("docs/engine-releases.md lacks the table of %s: run make generate", adapter.Type)
		}
	}
}
