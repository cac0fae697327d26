// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/gitops"
)

// The health checks for Argo CD are tested on objects recorded by this suite:
//
//	go test ./test/e2e -args -states "$PWD/config/argocd/resource_customizations"
//
// writes an object for each state and each reason that has no file yet. `go test ./test/gitops -args -update` then adds
// the result of the health check.
var statesDir = flag.String("states", "", "directory for one object of each observed state of each kind; existing states are not written again")

// stateKinds lists the kinds that have a health check.
var stateKinds = []schema.GroupVersionKind{
	semmoev1.GroupVersion.WithKind("MoEDeployment"),
	semmoev1.GroupVersion.WithKind("AffinityProfile"),
	semmoev1.GroupVersion.WithKind("PlacementPlan"),
	leaderworkersetv1.GroupVersion.WithKind("LeaderWorkerSet"),
}

// recordStates writes states to a directory until the context ends.
func recordStates(ctx context.Context, dir string) {
	for _, gvk := range stateKinds {
		go func() {
			for ctx.Err() == nil {
				if err := recordKind(ctx, gvk, filepath.Join(dir, gvk.Group, gvk.Kind, "testdata")); err != nil {
					fmt.Fprintf(os.Stderr, "failed to record states of %s: %v\n", gvk.Kind, err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(time.Second): // the kind may be installed later, and watches end from time to time
				}
			}
		}()
	}
}

func recordKind(ctx context.Context, gvk schema.GroupVersionKind, dir string) error {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(gvk)
	if err := api.List(ctx, list); err != nil {
		return nil // the kind is not installed yet
	}
	changes, err := api.Watch(ctx, list)
	if err != nil {
		return err
	}
	defer changes.Stop()
	recorded, err := recordedReasons(dir)
	if err != nil {
		return err
	}
	for change := range changes.ResultChan() {
		object, ok := change.Object.(*unstructured.Unstructured)
		if !ok || change.Type == watch.Error {
			return nil
		}
		if err := recordState(object, dir, recorded); err != nil {
			return err
		}
	}
	return nil
}

// recordedReasons returns the reasons of all objects in a directory.
func recordedReasons(dir string) (sets.Set[string], error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	recorded := sets.New[string]()
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(text, &object.Object); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		recorded = recorded.Union(gitops.Reasons(object))
	}
	return recorded, nil
}

// recordState writes an object if its state has no file yet or one of its reasons is not recorded yet.
func recordState(object *unstructured.Unstructured, dir string, recorded sets.Set[string]) error {
	name, reasons := stateOf(object), sets.New[string]()
	if object.GetDeletionTimestamp() == nil { // health checks ignore the reasons of deleted objects
		reasons = gitops.Reasons(object)
	}
	file := filepath.Join(dir, name+".yaml")
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		news := sets.List(reasons.Difference(recorded))
		if err != nil || len(news) == 0 {
			return err
		}
		file = filepath.Join(dir, name+"-"+kebab(news[0])+".yaml")
	}
	recorded.Insert(sets.List(reasons)...)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	text, err := yaml.Marshal(plain(object))
	if err != nil {
		return err
	}
	text = loopback.ReplaceAll(temporary.ReplaceAll(text, []byte("/srv/models")), []byte("127.0.0.1:9090"))
	text = []byte(strings.NewReplacer(checkpointDir(), "/srv/models/tiny", repository, "/srv", object.GetNamespace(), "models").Replace(string(text)))
	return os.WriteFile(file, text, 0o644)
}

// temporary matches a temporary directory of a test.
var temporary = regexp.MustCompile(regexp.QuoteMeta(filepath.Clean(os.TempDir())) + `/Test[A-Za-z0-9_]+/\d+`)

// loopback matches a test server's address with an ephemeral port.
var loopback = regexp.MustCompile(`127\.0\.0\.1:\d{4,}`)

// plain returns an object without the fields that no health check reads and that differ between runs.
func plain(object *unstructured.Unstructured) map[string]any {
	metadata := map[string]any{}
	for _, field := range []string{"name", "namespace", "generation", "deletionTimestamp", "finalizers"} {
		if value, found, _ := unstructured.NestedFieldCopy(object.Object, "metadata", field); found {
			metadata[field] = value
		}
	}
	kept := map[string]any{"apiVersion": object.GetAPIVersion(), "kind": object.GetKind(), "metadata": metadata}
	for _, field := range []string{"spec", "status"} {
		if value, found := object.Object[field]; found {
			kept[field] = value
		}
	}
	return kept
}

// stateOf returns a name for the state of an object's conditions, as far as a health check can read it. Objects with
// equal names are in the same state.
func stateOf(object *unstructured.Unstructured) string {
	conditions := conditionsOf(object)
	observed, _, _ := unstructured.NestedInt64(object.Object, "status", "observedGeneration")
	switch {
	case object.GetDeletionTimestamp() != nil:
		return "deleting"
	case len(conditions) == 0:
		return "new"
	case object.GroupVersionKind().Group == leaderworkersetv1.GroupVersion.Group:
		return groupState(object, conditions)
	}
	var parts []string
	if observed != object.GetGeneration() {
		parts = append(parts, "stale")
	}
	if reconciliation, _, _ := unstructured.NestedString(object.Object, "spec", "reconciliation"); reconciliation == string(semmoev1.ReconciliationPaused) {
		parts = append(parts, "paused")
	}
	ready := conditions[semmoev1.ConditionReady]
	parts = append(parts, map[string]string{"True": "ready", "False": "unready"}[ready.status], kebab(ready.reason))
	if degraded := conditions[semmoev1.ConditionDegraded]; degraded.status == "True" {
		parts = append(parts, "degraded")
		if degraded.reason != ready.reason {
			parts = append(parts, kebab(degraded.reason))
		}
	}
	for _, kind := range []string{semmoev1.ConditionStalled, semmoev1.ConditionReconciling} {
		if conditions[kind].status == "True" {
			parts = append(parts, kebab(kind))
		}
	}
	if rolled, found := conditions[semmoev1.ConditionRolledOut]; found && ready.status == "True" {
		parts = append(parts, "plan", kebab(rolled.reason))
	}
	return strings.Join(parts, "-")
}

// groupState is stateOf for a LeaderWorkerSet, which has different conditions.
func groupState(object *unstructured.Unstructured, conditions map[string]stateCondition) string {
	var parts []string
	for kind, condition := range conditions {
		if condition.generation != object.GetGeneration() {
			parts = append(parts, "stale")
		}
		if condition.status == "True" {
			parts = append(parts, kebab(kind))
		}
	}
	if replicas, found, _ := unstructured.NestedInt64(object.Object, "spec", "replicas"); found && replicas == 0 {
		parts = append(parts, "zero")
	}
	slices.Sort(parts)
	return strings.Join(slices.Compact(parts), "-")
}

type stateCondition struct {
	status, reason string
	generation     int64
}

func conditionsOf(object *unstructured.Unstructured) map[string]stateCondition {
	found := map[string]stateCondition{}
	list, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	for _, item := range list {
		condition, _ := item.(map[string]any)
		kind, _, _ := unstructured.NestedString(condition, "type")
		status, _, _ := unstructured.NestedString(condition, "status")
		reason, _, _ := unstructured.NestedString(condition, "reason")
		generation, _, _ := unstructured.NestedInt64(condition, "observedGeneration")
		found[kind] = stateCondition{status, reason, generation}
	}
	return found
}

// kebab converts a CamelCase word to lower case with hyphens.
func kebab(word string) string {
	var text strings.Builder
	for i, r := range word {
		if i > 0 && r >= 'A' && r <= 'Z' {
			text.WriteByte('-')
		}
		text.WriteRune(r)
	}
	return strings.ToLower(text.String())
}
