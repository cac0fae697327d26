// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

func replanGoldens() map[string]golden {
	denyPlan := func(object client.Object, _ *client.CreateOptions) error {
		if _, is := object.(*semmoev1.PlacementPlan); is {
			return apierrors.NewForbidden(schema.GroupResource{Group: "semmoe.io", Resource: "placementplans"}, object.GetName(), errors.New("exceeded quota: plans"))
		}
		return nil
	}
	denyAfterDryRun := func(object client.Object, options *client.CreateOptions) error {
		if len(options.DryRun) > 0 {
			return nil
		}
		return denyPlan(object, options)
	}
	tables := &corev1.ConfigMap{ObjectMeta: ofQwen("qwen-tables", time.Hour, semmoev1.ComponentTables), Data: map[string]string{semmoev1.TablesKey: `{"` + firstDigest + `":"` + secondDigest + `"}`}}
	return map[string]golden{
		"replan":              {command: "replan qwen", objects: append(awaiting(inService), tables), width: 100},
		"replan-refused":      {command: "replan qwen", objects: awaiting(inService), createError: denyPlan, width: 100, code: exitError},
		"replan-half":         {command: "replan qwen", objects: awaiting(inService), createError: denyAfterDryRun, width: 100, code: exitError},
		"replan-dry-run-json": {command: "replan qwen --dry-run=server -o json", objects: awaiting(inService)},
		"replan-without-plan": {command: "replan qwen", objects: awaiting(), width: 80, code: exitState},
		"replan-tokens":       {command: "replan qwen", objects: awaiting(inService, tensorParallel), width: 80, code: exitState},
		"replan-shuffled":     {command: "replan qwen", objects: awaiting(inService, tensorParallel, shuffled), width: 80, code: exitState},
		"replan-no-profile":   {command: "replan qwen", objects: []client.Object{deployment(inService), planned("qwen-c65ee2b4", firstDigest, time.Minute)}, width: 80, code: exitState},
		"replan-since":        {command: "replan qwen --since=-1h", objects: awaiting(), width: 80, code: exitUsage},
	}
}

// TestReplanCreatesBothOrNone verifies that a rejected plan leaves no unused profile.
func TestReplanCreatesBothOrNone(t *testing.T) {
	for name, want := range map[string]int{"replan": 2, "replan-refused": 0, "replan-dry-run-json": 0} {
		created := 0
		g := goldens()[name]
		createError := g.createError
		g.createError = func(object client.Object, options *client.CreateOptions) error {
			if createError != nil {
				if err := createError(object, options); err != nil {
					return err
				}
			}
			if len(options.DryRun) == 0 {
				created++
			}
			return nil
		}
		if g.run(t); created != want {
			t.Errorf("%s: %d objects created, want %d", name, created, want)
		}
	}
}
