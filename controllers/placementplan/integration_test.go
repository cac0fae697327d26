// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
)

func TestPlanIsSolvedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	p := w.newPlan("tiny", "tiny")
	w.wait(p, semmoev1.ConditionReady, metav1.ConditionFalse, "ProfileNotFound", "AffinityProfile tiny", "Create it")
	source := w.newProfile("tiny")
	w.wait(p, semmoev1.ConditionProgressing, metav1.ConditionTrue, "WaitingForProfile")
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	w.complete(source, traceFile(t))
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	w.wait(p, semmoev1.ConditionReconciling, metav1.ConditionFalse, "Complete")
	w.wait(p, semmoev1.ConditionStalled, metav1.ConditionFalse, "NotStalled")

	status := done.Status
	if status.Verdict != semmoev1.VerdictGain || status.Forecast == nil || status.Forecast.LARMilli <= status.Forecast.BaselineMilli ||
		status.Forecast.LARMilli > status.Forecast.UpperBoundMilli || status.Forecast.WindowImbalanceMilli < 1000 {
		t.Errorf("unexpected verdict %s, forecast %+v", status.Verdict, status.Forecast)
	}
	if f := status.Forecast; f.LayerNanos == 0 || f.LayerNanos >= f.BaselineLayerNanos || f.Hardware != hardware.Default {
		t.Errorf("forecast %+v", f)
	}
	if status.ModelDigest != modelDigest || len(status.PlanDigest) != 64 || status.Plan != status.PlanDigest[:16] || status.ConfigMap != "tiny-"+status.Plan {
		t.Errorf("status %+v", status)
	}
	cm := w.configMap(status.ConfigMap)
	if !*cm.Immutable || !metav1.IsControlledBy(cm, done) || cm.Annotations[semmoev1.AnnotationPlanDigest] != status.PlanDigest ||
		cm.Labels[semmoev1.LabelPlan] != "tiny" || cm.Labels[semmoev1.LabelComponent] != semmoev1.ComponentPlan {
		t.Errorf("ConfigMap %+v", cm.ObjectMeta)
	}
	dir := filepath.Join(t.TempDir(), "plan")
	if err := bundle.Fetch(ctx, w.client, w.namespace, status.PlanDigest, dir); err != nil {
		t.Fatal(err)
	}
	solved, a, err := plan.Read(dir)
	if err != nil || solved.ModelDigest != modelDigest || solved.Placement.Ranks != 4 || solved.Attention != placement.DataParallel {
		t.Errorf("%v, %+v", err, solved)
	}
	if s := solved.Schedule; s == nil || s.Hardware != hardware.Default || s.Ranks != 4 || len(s.Disaggregated) == 0 || cm.Data[plan.ScheduleFile] == "" {
		t.Errorf("the schedule is %+v", s)
	}
	want, err := bundle.ConfigMapData(a, "SGLang")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, cm.Data); diff != "" {
		t.Errorf("ConfigMap (-plan +found):\n%s", diff)
	}
	if words, err := os.ReadFile(filepath.Join(dir, bundle.TokenizerFile)); err != nil || string(words) != "words" {
		t.Errorf("tokenizer %q, %v", words, err)
	}

	edited := cm.DeepCopy()
	edited.Data["placement.json"] = "{}"
	if err := api.Update(ctx, edited); err == nil || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("editing the ConfigMap: error = %v, want an error about immutability", err)
	}
	changed := done.DeepCopy()
	changed.Spec.ExpertParallelSize = 8
	if err := api.Patch(ctx, changed, client.MergeFrom(done)); err == nil || !strings.Contains(err.Error(), "cannot be changed") {
		t.Errorf("changing the spec: error = %v, want a validation error", err)
	}

	stored := w.stored()
	again := func(what string) {
		t.Helper()
		back := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
		w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
		found := w.configMap(status.ConfigMap)
		if diff := cmp.Diff(cm.Data, found.Data); diff != "" || !metav1.IsControlledBy(found, back) {
			t.Errorf("%s: the ConfigMap contains another plan:\n%s", what, diff)
		}
		if diff := cmp.Diff(facts(done), facts(back)); diff != "" {
			t.Errorf("%s: status (-before +after):\n%s", what, diff)
		}
		if diff := cmp.Diff(stored, w.stored()); diff != "" {
			t.Errorf("%s: solved again (-before +after):\n%s", what, diff)
		}
	}
	w.delete(cm)
	w.eventually("the ConfigMap is a new one", func() error {
		if w.configMap(status.ConfigMap).UID == cm.UID {
			return fmt.Errorf("the ConfigMap is not recreated")
		}
		return nil
	})
	again("ConfigMap deleted")
	w.wipe(p)
	again("status wiped")
	w.patchStatus(p, types.MergePatchType, `{"status":{"verdict":"NoGainExpected"}}`)
	w.eventually("the status is true again", func() error {
		var found semmoev1.PlacementPlan
		if err := api.Get(ctx, client.ObjectKeyFromObject(p), &found); err != nil || found.Status.Verdict != done.Status.Verdict {
			return fmt.Errorf("verdict %s, %v", found.Status.Verdict, err)
		}
		return nil
	})
	again("status falsified")
	w.stop()
	w.startManager()
	w.touch(source)
	again("manager restarted")

	t.Run("steady state", func(t *testing.T) {
		written := w.manager.Writes()
		for range 20 {
			before := w.manager.Reconciliations()
			w.touch(source)
			w.eventually("the plan is looked at", func() error {
				if w.manager.Reconciliations() == before {
					return fmt.Errorf("%d reconciliations as before", before)
				}
				return nil
			})
		}
		w.stop() // waits for the last reconciliation
		if writes := w.manager.Writes() - written; writes != 0 {
			t.Errorf("%d writes", writes)
		}
	})

	// No garbage collector runs here: objects that the controller creates for a deleted plan would remain.
	w.stop()
	w.delete(p)
	w.delete(w.configMap(status.ConfigMap))
	w.delete(w.configMap(status.StableConfigMap))
	p = w.newPlan("tiny", "tiny")
	w.startManager()
	again("plan recreated")
	w.delete(source)
	w.delete(w.configMap(status.ConfigMap))
	again("profile and ConfigMap deleted")
}

// TestStableConfigMap checks that a standalone plan has a second ConfigMap with a name that is known in advance, and
// that its content never changes.
func TestStableConfigMap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	source := w.newProfile("tiny")
	w.complete(source, traceFile(t))
	foreign := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "taken-plan"}}
	w.create(foreign)
	p, taken := w.newPlan("tiny", "tiny"), w.newPlan("taken", "tiny")
	children := w.newPlan("made", "tiny", func(p *semmoev1.PlacementPlan) {
		p.OwnerReferences = ownership.ControllerReference(&semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Name: "m", UID: "uid"}}, "MoEDeployment")
	})

	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	stable := w.configMap("tiny-plan")
	if diff := cmp.Diff(w.configMap(done.Status.ConfigMap).Data, stable.Data); diff != "" || !*stable.Immutable || !metav1.IsControlledBy(stable, done) {
		t.Errorf("ConfigMap %+v (-plan's +found):\n%s", stable.ObjectMeta, diff)
	}
	w.eventually("the status names it", func() error {
		if err := api.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil || p.Status.StableConfigMap != stable.Name {
			return fmt.Errorf("%q, %v", p.Status.StableConfigMap, err)
		}
		return nil
	})
	w.delete(stable)
	w.eventually("another one", func() error {
		if w.configMap(stable.Name).UID == stable.UID {
			return fmt.Errorf("the ConfigMap is not recreated")
		}
		return nil
	})

	// A ConfigMap of another owner is kept and reported; the ConfigMap with the plan digest is created.
	if status := w.wait(taken, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ConfigMapConflict", "taken-plan").Status; status.StableConfigMap != "" || status.ConfigMap == "" {
		t.Errorf("status %+v", status)
	}
	w.wait(taken, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	w.delete(foreign)
	w.touch(source)
	w.wait(taken, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	if made := w.wait(children, semmoev1.ConditionReady, metav1.ConditionTrue, "Published"); made.Status.StableConfigMap != "" {
		t.Errorf("a plan of a MoEDeployment has ConfigMap %s", made.Status.StableConfigMap)
	}

	// The stable ConfigMap of a lost plan stays, for the pods that mount it.
	w.stop()
	w.delete(w.configMap(stable.Name))
	manifest, _, err := artifact.DigestOf(strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	lost, err := configMap(p, stable.Name, &solved{PlanDigest: string(manifest)}, map[string]string{plan.ManifestFile: "{}", plan.PlacementFile: "{}"})
	if err != nil {
		t.Fatal(err)
	}
	w.create(lost)
	w.startManager()
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionTrue, "StableConfigMapOutdated", manifest.Short(), done.Status.Plan)
	if found := w.configMap(stable.Name); found.UID != lost.UID {
		t.Error("the ConfigMap was replaced")
	}
	w.delete(lost)
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
}

// TestStoreUnavailable checks that a published plan stays published while the store is unavailable, even if the status
// is lost.
func TestStoreUnavailable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	source := w.newProfile("tiny")
	w.complete(source, traceFile(t))
	p := w.newPlan("tiny", "tiny")
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	w.store.Stop()
	w.touch(source)
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionTrue, "StoreUnavailable")
	away := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if away.Status.Verdict != semmoev1.VerdictGain || away.Status.PlanDigest != done.Status.PlanDigest {
		t.Errorf("status %+v", away.Status)
	}
	w.wipe(p)
	away = w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if diff := cmp.Diff(done.Status.Forecast, away.Status.Forecast); diff != "" || away.Status.PlanDigest != done.Status.PlanDigest || away.Status.ConfigMap != done.Status.ConfigMap {
		t.Errorf("status %+v", away.Status)
	}
	waiting := w.newPlan("later", "tiny")
	w.wait(waiting, semmoev1.ConditionReady, metav1.ConditionFalse, "StoreUnavailable", "is retried")

	w.store.Start(t)
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	back := w.wait(waiting, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if back.Status.PlanDigest != done.Status.PlanDigest || back.Status.ConfigMap == done.Status.ConfigMap {
		t.Errorf("two plans of the same inputs: %+v and %+v", back.Status, done.Status)
	}
}

// TestLostPlanIsSolvedAgain checks that a plan that the store lost is solved again, and that its new solution is used.
func TestLostPlanIsSolvedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	source := w.newProfile("tiny")
	w.complete(source, traceFile(t))
	p := w.newPlan("tiny", "tiny")
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	scope, err := bundle.Scope(w.namespace, done.Status.PlanDigest)
	if err != nil {
		t.Fatal(err)
	}
	artifacts, err := w.client.List(t.Context(), scope)
	if err != nil || len(artifacts) < 8 {
		t.Fatalf("%d artifacts, %v", len(artifacts), err)
	}
	for _, a := range artifacts {
		// In the meantime the operator may have noticed missing files, and stored some of them again.
		if err := w.client.Delete(t.Context(), a); err != nil && !errors.Is(err, artifact.ErrConflict) {
			t.Fatal(err)
		}
	}
	w.touch(source)
	w.eventually("the plan is back in the store", func() error {
		complete, err := bundle.Complete(t.Context(), w.client, w.namespace, done.Status.PlanDigest)
		if err == nil && !complete {
			err = fmt.Errorf("the plan is not complete")
		}
		return err
	})
	back := w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	if diff := cmp.Diff(facts(done), facts(back)); diff != "" {
		t.Errorf("status (-before +after):\n%s", diff)
	}

	// The solution of another version of the solver, whose plan is lost, is replaced.
	inputs := w.configMap(done.Status.ConfigMap).Labels[semmoev1.LabelInputs]
	foreign, err := fetchSolution(t.Context(), w.client, w.namespace, inputs)
	if err != nil || foreign == nil {
		t.Fatal(foreign, err)
	}
	lost := *foreign
	foreign.PlanDigest = strings.Repeat("0", 64)
	if err := publishSolution(t.Context(), w.client, w.namespace, foreign, &lost); err != nil {
		t.Fatal(err)
	}
	for _, a := range artifacts {
		if again, err := w.client.List(t.Context(), a.Scope); err != nil {
			t.Fatal(err)
		} else if len(again) > 0 {
			if err := w.client.Delete(t.Context(), again[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.touch(source)
	w.eventually("the solution is of the plan", func() error {
		now, err := fetchSolution(t.Context(), w.client, w.namespace, inputs)
		if err == nil && (now == nil || now.PlanDigest != done.Status.PlanDigest) {
			err = fmt.Errorf("solution %+v", now)
		}
		return err
	})

	// A damaged solution counts as missing, and is replaced.
	scope = solutionScope(w.namespace, inputs)
	digest, err := w.client.Published(t.Context(), scope)
	if err != nil {
		t.Fatal(err)
	}
	w.store.Damage(t, scope, digest)
	if found, err := fetchSolution(t.Context(), w.client, w.namespace, inputs); found != nil || err != nil {
		t.Errorf("damaged solution: got %+v, error %v", found, err)
	}
}

func TestInvalidInputs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sound := w.newProfile("sound")
	w.complete(sound, traceFile(t))
	damaged := w.newProfile("damaged")
	w.complete(damaged, bytes.Repeat([]byte("x"), 100))
	for _, test := range []struct {
		plan   *semmoev1.PlacementPlan
		reason string
		parts  []string
	}{
		{
			w.newPlan("size", "sound", func(p *semmoev1.PlacementPlan) { p.Spec.ExpertParallelSize = 5 }),
			"InvalidExpertParallelSize", []string{"spec.expertParallelSize", "5", "1, 2, 4, 8, 16, 32"},
		},
		{w.newPlan("damaged", "damaged"), "ProfileInvalid", []string{"routing trace", "safetensors"}},
	} {
		for _, kind := range []string{semmoev1.ConditionStalled, semmoev1.ConditionDegraded} {
			w.wait(test.plan, kind, metav1.ConditionTrue, test.reason, test.parts...)
		}
		w.wait(test.plan, semmoev1.ConditionReady, metav1.ConditionFalse, test.reason)
		w.wait(test.plan, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Stalled")
	}
}

// TestForeignConfigMaps checks that a ConfigMap of another owner is reported, and that a forged ConfigMap of the plan
// is replaced.
func TestForeignConfigMaps(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	source := w.newProfile("tiny")
	w.complete(source, traceFile(t))
	p := w.newPlan("tiny", "tiny")
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	cm := w.configMap(done.Status.ConfigMap)

	w.stop()
	w.delete(cm)
	forged := cm.DeepCopy()
	forged.ObjectMeta = metav1.ObjectMeta{Namespace: w.namespace, Name: cm.Name, Labels: cm.Labels, Annotations: cm.Annotations, OwnerReferences: cm.OwnerReferences}
	forged.Data["manifest.json"] = "{}"
	w.create(forged)
	w.startManager()
	w.eventually("the forged ConfigMap is replaced", func() error {
		if found := w.configMap(cm.Name); found.Data["manifest.json"] == "{}" {
			return fmt.Errorf("the ConfigMap exists")
		}
		return nil
	})
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")

	w.stop()
	w.delete(w.configMap(cm.Name))
	w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: cm.Name, Labels: cm.Labels}})
	w.startManager()
	w.wait(p, semmoev1.ConditionReady, metav1.ConditionFalse, "ConfigMapConflict", cm.Name, "Delete it")
	w.delete(w.configMap(cm.Name))
	w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")

	// A ConfigMap without an owner, for example from a restored backup, is adopted.
	w.stop()
	orphan := w.configMap(cm.Name)
	if err := api.Patch(t.Context(), orphan, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"ownerReferences":null}}`))); err != nil {
		t.Fatal(err)
	}
	w.startManager()
	w.eventually("the ConfigMap has its owner again", func() error {
		if found := w.configMap(cm.Name); found.UID != orphan.UID || !metav1.IsControlledBy(found, p) {
			return fmt.Errorf("%s is owned by %+v", found.UID, found.OwnerReferences)
		}
		return nil
	})
	w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
}

// TestKeptConfigMap checks that a ConfigMap that a workload uses outlives its plan, that another plan of the same name
// does not change it, and that the same plan adopts it when it is created again. Further reconciliations write nothing.
func TestKeptConfigMap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.complete(w.newProfile("tiny"), traceFile(t))
	p := w.newPlan("tiny", "tiny")
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	served := w.configMap(done.Status.ConfigMap)
	workload := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "serving"},
		Spec: appsv1.StatefulSetSpec{Replicas: ptr.To[int32](0), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}},
			Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "engine", Image: "engine"}},
				Volumes: []corev1.Volume{{Name: semmoev1.PlanVolume, VolumeSource: corev1.VolumeSource{
					ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: served.Name}},
				}}},
			},
		}},
	}
	w.create(workload)
	keep := func() *corev1.ConfigMap {
		t.Helper()
		if err := (childobjects.Writer{Client: api}).Write(t.Context(), nil, revisions.KeepPlan{Workload: revisions.StatefulSet(workload)}); err != nil {
			t.Fatal(err)
		}
		return w.configMap(served.Name)
	}
	kept := keep()
	if !metav1.IsControlledBy(kept, done) || len(kept.OwnerReferences) != 2 || kept.UID != served.UID {
		t.Errorf("owners are %+v", kept.OwnerReferences)
	}
	w.stop()
	w.startManager() // continues with the existing objects
	w.touch(&semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "tiny"}})
	w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if again := keep(); again.ResourceVersion != kept.ResourceVersion {
		t.Errorf("the ConfigMap was written again: %+v", again.ObjectMeta)
	}

	// remove deletes a plan and its owner references, as the garbage collector would. No garbage collector runs here.
	remove := func(p *semmoev1.PlacementPlan) {
		t.Helper()
		w.delete(p)
		patch := fmt.Sprintf(`{"metadata":{"ownerReferences":[{"$patch":"delete","uid":%q}]}}`, p.UID)
		if err := api.Patch(t.Context(), w.configMap(served.Name), client.RawPatch(types.StrategicMergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
	}
	remove(done)
	other := w.newPlan("tiny", "tiny", func(p *semmoev1.PlacementPlan) { p.Spec.Solver.Seed = ptr.To[int64](7) })
	replaced := w.wait(other, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if left := w.configMap(served.Name); replaced.Status.ConfigMap == served.Name || len(left.OwnerReferences) != 1 || left.OwnerReferences[0].UID != workload.UID {
		t.Errorf("another plan has ConfigMap %s; owners of the one in service are %+v", replaced.Status.ConfigMap, left.OwnerReferences)
	}
	w.delete(other)
	w.delete(w.configMap(replaced.Status.ConfigMap))
	same := w.wait(w.newPlan("tiny", "tiny"), semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if back := w.configMap(served.Name); back.UID != served.UID || !metav1.IsControlledBy(back, same) || len(back.OwnerReferences) != 2 {
		t.Errorf("owners are %+v", back.OwnerReferences)
	}
}

// TestLostPlanStaysPublished checks that a plan that the store lost and that cannot be solved again stays published,
// because engines may serve it.
func TestLostPlanStaysPublished(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	source := w.newProfile("tiny")
	w.complete(source, traceFile(t))
	p := w.newPlan("tiny", "tiny")
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	all, err := w.client.ListAll(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if err := w.client.Delete(t.Context(), a); err != nil {
			t.Fatal(err)
		}
	}
	w.touch(source) // the profile reports ready, but its files are lost, too
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionTrue, "SolveFailed", "read the profile")
	w.delete(source)
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ProfileNotFound")
	lost := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if diff := cmp.Diff(done.Status.Forecast, lost.Status.Forecast); diff != "" || lost.Status.ConfigMap != done.Status.ConfigMap {
		t.Errorf("status %+v", lost.Status)
	}

	w.complete(w.newProfile("tiny"), traceFile(t))
	back := w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	if back.Status.PlanDigest != done.Status.PlanDigest {
		t.Errorf("status %+v", back.Status)
	}
}

// TestPlanWithoutTokenShuffle checks that a plan without token shuffle predicts fewer messages, and the same local
// rate.
func TestPlanWithoutTokenShuffle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.complete(w.newProfile("tiny"), traceFile(t))
	p := w.newPlan("tokens", "tiny", func(p *semmoev1.PlacementPlan) {
		p.Spec.Attention, p.Spec.TokenShuffle = semmoev1.AttentionTensorParallel, semmoev1.TokenShuffleDisabled
	})
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published", "without token shuffle the local activation rate is 25.0% under any plan")
	f := done.Status.Forecast
	if f.LARMilli != 250 || f.BaselineMilli != 250 || f.RemoteRanksMilli <= 0 || f.RemoteRanksMilli >= f.BaselineRemoteRanksMilli || done.Status.Verdict != semmoev1.VerdictGain {
		t.Errorf("verdict %s, forecast %+v", done.Status.Verdict, f)
	}
	solved, _, err := bundle.FetchPlan(t.Context(), w.client, w.namespace, done.Status.PlanDigest)
	if err != nil || solved.Objective != placement.RankDedup || solved.Tokens == nil || solved.Drift != nil {
		t.Errorf("%v: objective %s, drift %+v", err, solved.Objective, solved.Drift)
	}
	refused := p.DeepCopy()
	refused.ObjectMeta = metav1.ObjectMeta{Namespace: w.namespace, Name: "requests"}
	refused.Spec.Attention = semmoev1.AttentionDataParallel
	if err := api.Create(t.Context(), refused); err == nil || !strings.Contains(err.Error(), "spec.tokenShuffle") {
		t.Errorf("tokenShuffle with attention DataParallel: error = %v, want a validation error", err)
	}
}
