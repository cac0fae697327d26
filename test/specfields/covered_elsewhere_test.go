// SPDX-License-Identifier: Apache-2.0

package specfields

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// checkElsewhere checks that each field in shownElsewhere exists, and that its test exists.
func checkElsewhere(t *testing.T) {
	t.Helper()
	known := map[string]bool{}
	for kind, of := range map[string]struct {
		plural string
		spec   reflect.Type
	}{
		"MoEDeployment":   {"moedeployments", reflect.TypeFor[semmoev1.MoEDeploymentSpec]()},
		"AffinityProfile": {"affinityprofiles", reflect.TypeFor[semmoev1.AffinityProfileSpec]()},
		"PlacementPlan":   {"placementplans", reflect.TypeFor[semmoev1.PlacementPlanSpec]()},
	} {
		for _, f := range fieldsOf(t, nil, specSchema(t, of.plural), of.spec) {
			known[kind+" "+f.String()] = true
		}
	}
	for name, test := range shownElsewhere {
		if !known[name] {
			t.Errorf("shownElsewhere lists %s for test %s, but the field does not exist", name, test)
		}
		directory, function, _ := strings.Cut(test, " ")
		files, err := filepath.Glob(filepath.Join(repository, directory, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			found = found || strings.Contains(string(text), "func "+function+"(")
		}
		if !found {
			t.Errorf("shownElsewhere lists %s for test %s, but %s has no such test", name, function, directory)
		}
	}
}
