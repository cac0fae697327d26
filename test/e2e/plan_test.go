// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/profile"
)

// storedProfile creates an AffinityProfile of the small model. Its result is already in the store, so no engine is
// needed.
func storedProfile(t *testing.T, namespace string) *semmoev1.AffinityProfile {
	t.Helper()
	return storedProfileOf(t, namespace, "tiny", "texts", filepath.Join(repository, "solver", "testdata", "tiny-32e-top4.safetensors.zst"))
}

// storedProfileOf creates an AffinityProfile with the routing trace of a file as its result. Its data set is a
// ConfigMap with one request.
func storedProfileOf(t *testing.T, namespace, name, dataset, trace string) *semmoev1.AffinityProfile {
	t.Helper()
	p := publishedProfile(t, namespace, name, dataset, trace)
	create(t, p)
	return p
}

// publishedProfile stores the result of storedProfileOf, and returns the AffinityProfile without creating it.
func publishedProfile(t *testing.T, namespace, name, dataset, trace string) *semmoev1.AffinityProfile {
	t.Helper()
	model, err := checkpoint.Inspect(checkpointDir())
	if err != nil {
		t.Fatal(err)
	}
	texts := fmt.Sprintf("{\"prompt\": %q}\n", "func "+dataset+"() {")
	create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: dataset}, Data: map[string]string{"dataset.jsonl": texts}})
	sum := sha256.Sum256([]byte(texts))
	counts := filepath.Join(t.TempDir(), profile.CountsFile)
	if err := os.WriteFile(counts, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	store, err := startStore(t).Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sampling := profile.Sampling{Requests: 2000, Tokens: 200000, RequestTokens: 512}
	manifest := profile.Manifest{ModelDigest: model.ModelDigest, DatasetDigest: hex.EncodeToString(sum[:]), Sampling: sampling}
	scope := artifact.Scope{Namespace: namespace, Kind: artifact.Profile, ID: manifest.ID()}
	if _, err := profile.Publish(t.Context(), store, scope, manifest, map[string]string{
		profile.TraceFile:     trace,
		profile.CountsFile:    counts,
		profile.TokenizerFile: filepath.Join(checkpointDir(), "tokenizer.json"),
	}); err != nil {
		t.Fatal(err)
	}
	moed := newDeployment(namespace, "unused")
	return &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: semmoev1.AffinityProfileSpec{
			Model: moed.Spec.Model, Engine: moed.Spec.Engine, Parallelism: moed.Spec.Parallelism,
			Dataset: &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: dataset}},
			Target:  semmoev1.ProfilingTargetDedicated,
			SamplingSpec: semmoev1.SamplingSpec{
				Requests: int32(sampling.Requests), Tokens: int32(sampling.Tokens), RequestTokens: int32(sampling.RequestTokens),
			},
		},
	}
}

func newPlan(namespace, name string, size int32) *semmoev1.PlacementPlan {
	return &semmoev1.PlacementPlan{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       semmoev1.PlacementPlanSpec{ProfileRef: semmoev1.ProfileReference{Name: "tiny"}, ExpertParallelSize: size, BatchTokens: 1 << 20, MinimumGainPercent: ptr.To[int32](0)},
	}
}

// waitPlan waits until a condition of a plan has the given reason and its message contains all parts.
func waitPlan(t *testing.T, plan *semmoev1.PlacementPlan, kind, reason string, parts ...string) *semmoev1.PlacementPlan {
	t.Helper()
	current := &semmoev1.PlacementPlan{}
	eventually(t, waitTimeout, kind+" of plan "+plan.Name+" is "+reason, func() error {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(plan), current); err != nil {
			return err
		}
		c := meta.FindStatusCondition(current.Status.Conditions, kind)
		if c == nil || c.Reason != reason {
			return fmt.Errorf("condition %+v", c)
		}
		for _, part := range parts {
			if !strings.Contains(c.Message, part) {
				return fmt.Errorf("the message %q lacks %q", c.Message, part)
			}
		}
		return nil
	})
	return current
}

// TestPlan makes a plan from a profile in the store, and publishes it in a ConfigMap that pods can verify. Nothing is
// profiled or solved twice.
func TestPlan(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	storedProfile(t, namespace)
	plan, odd := newPlan(namespace, "tiny", 4), newPlan(namespace, "odd", 5)
	create(t, plan)
	create(t, odd)
	waitPlan(t, odd, semmoev1.ConditionStalled, "InvalidExpertParallelSize", "spec.expertParallelSize", "1, 2, 4, 8, 16, 32")
	done := waitPlan(t, plan, semmoev1.ConditionReady, "Published")
	if done.Status.Verdict != semmoev1.VerdictGain || done.Status.Forecast.LARMilli <= done.Status.Forecast.BaselineMilli {
		t.Errorf("status %+v", done.Status)
	}
	configMap := getConfigMap(t, namespace, done.Status.ConfigMap)
	edited := configMap.DeepCopy()
	edited.Data["sglang.json"] = "{}"
	if err := api.Update(t.Context(), edited); err == nil || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("editing a plan's ConfigMap returned %v, want an error", err)
	}
	store, err := startStore(t).Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := bundle.Fetch(t.Context(), store, namespace, done.Status.PlanDigest, filepath.Join(t.TempDir(), "plan")); err != nil {
		t.Error(err)
	}
	verifyInPod(t, done, 4, "")
	verifyInPod(t, done, 8, "the plan is for EP size 4; the engine has 8")

	// Lost objects are restored without another solve: the artifacts do not change.
	stored := storedPlans(t, store, namespace)
	same := func(what string) {
		t.Helper()
		again := waitPlan(t, plan, semmoev1.ConditionReady, "Published")
		if diff := cmp.Diff(configMap.Data, getConfigMap(t, namespace, done.Status.ConfigMap).Data); diff != "" || again.Status.PlanDigest != done.Status.PlanDigest {
			t.Errorf("%s: the plan changed: %+v\n%s", what, again.Status, diff)
		}
		if diff := cmp.Diff(stored, storedPlans(t, store, namespace)); diff != "" {
			t.Errorf("%s: the plan was solved again:\n%s", what, diff)
		}
	}
	if err := api.Delete(t.Context(), configMap); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the ConfigMap is recreated", func() error {
		found := &corev1.ConfigMap{}
		err := api.Get(t.Context(), client.ObjectKeyFromObject(configMap), found)
		if err == nil && found.UID == configMap.UID {
			err = errors.New("the old ConfigMap still exists")
		}
		return err
	})
	same("ConfigMap deleted")
	if err := api.Status().Patch(t.Context(), done.DeepCopy(), client.RawPatch(types.JSONPatchType, []byte(`[{"op":"remove","path":"/status"}]`))); err != nil {
		t.Fatal(err)
	}
	same("status wiped")
	stop()
	startManager(t, namespace, nil)
	if err := api.Delete(t.Context(), done); err != nil {
		t.Fatal(err)
	}
	waitDeleted(t, done)
	waitDeleted(t, configMap)
	plan = newPlan(namespace, "tiny", 4)
	create(t, plan)
	same("plan recreated")

	for _, p := range []*semmoev1.PlacementPlan{plan, odd} {
		if err := api.Delete(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		waitDeleted(t, p)
	}
	waitDeleted(t, configMap)
	var jobs batchv1.JobList
	if err := api.List(t.Context(), &jobs, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentProfile}); err != nil || len(jobs.Items) != 0 {
		t.Errorf("%d profiling Jobs for a stored profile, want none: %v", len(jobs.Items), err)
	}
}

func getConfigMap(t *testing.T, namespace, name string) *corev1.ConfigMap {
	t.Helper()
	found := &corev1.ConfigMap{}
	if err := api.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, found); err != nil {
		t.Fatal(err)
	}
	return found
}

// storedPlans returns the modification time of each stored artifact of the namespace's plans.
func storedPlans(t *testing.T, store *access.Client, namespace string) map[string]string {
	t.Helper()
	all, err := store.ListAll(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	times := map[string]string{}
	for _, a := range all {
		if a.Namespace == namespace && a.Kind == artifact.Plan {
			times[a.Scope.String()+" "+string(a.Digest)] = a.Modified.String()
		}
	}
	return times
}

func waitDeleted(t *testing.T, object client.Object) {
	t.Helper()
	eventually(t, waitTimeout, kindOf(object)+" "+object.GetName()+" is deleted", func() error {
		found := object.DeepCopyObject().(client.Object)
		switch err := api.Get(t.Context(), client.ObjectKeyFromObject(object), found); {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		case found.GetUID() != object.GetUID() && object.GetUID() != "":
			return nil
		}
		return errors.New("the object exists")
	})
}

// verifyInPod runs `semmoe verify` in a pod, on the mounted ConfigMap and checkpoint, like a user's workload. complaint
// is the expected error message, or empty if the verification must succeed.
func verifyInPod(t *testing.T, plan *semmoev1.PlacementPlan, size int, complaint string) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: plan.Namespace, Name: "verify-" + strconv.Itoa(size)},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever,
			Containers: []corev1.Container{{
				Name: "verify", Image: image,
				Args: []string{
					"verify", "--plan-dir", semmoev1.PlanMountPath, "--plan-digest", plan.Status.PlanDigest, "--model-path", semmoev1.ModelMountPath,
					"--model-digest", plan.Status.ModelDigest, "--expert-parallel-size", strconv.Itoa(size),
				},
				VolumeMounts: []corev1.VolumeMount{
					{Name: "model", MountPath: semmoev1.ModelMountPath, ReadOnly: true}, {Name: "plan", MountPath: semmoev1.PlanMountPath, ReadOnly: true},
				},
			}},
			Volumes: []corev1.Volume{
				{Name: "model", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: checkpointDir(), Type: ptr.To(corev1.HostPathDirectory)}}},
				{Name: "plan", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: plan.Status.ConfigMap}}}},
			},
		},
	}
	create(t, pod)
	eventually(t, waitTimeout, "pod "+pod.Name+" has ended", func() error {
		found := &corev1.Pod{}
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(pod), found); err != nil {
			return err
		}
		for _, status := range found.Status.ContainerStatuses {
			end := status.State.Terminated
			if end == nil {
				continue
			}
			if want := map[bool]int32{true: 0, false: 3}[complaint == ""]; end.ExitCode != want || !strings.Contains(end.Message, complaint) {
				t.Errorf("semmoe verify exited with %d, %q; want %d, %q", end.ExitCode, end.Message, want, complaint)
			}
			return nil
		}
		return fmt.Errorf("phase %s", found.Status.Phase)
	})
}
