// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/corpus"
)

// dataset returns a ConfigMap with requests of several kinds of text, taken from the first documents of each kind.
func dataset(t *testing.T, namespace string, perKind int) *corev1.ConfigMap {
	t.Helper()
	var chosen []corpus.Request
	for _, kind := range []string{"c", "chinese", "english", "python", "sql"} {
		var documents []corpus.Document
		for _, document := range corpus.Written() {
			if document.Kind == kind && len(documents) < perKind {
				documents = append(documents, document)
			}
		}
		chosen = append(chosen, corpus.Requests(documents, 300)...)
	}
	lines, err := corpus.JSONL(chosen)
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "corpus"},
		Data:       map[string]string{"dataset.jsonl": string(lines)},
	}
}

// profiledDeployment returns a MoEDeployment that requests a profile and a plan.
func profiledDeployment(namespace string, change ...func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
	return newDeployment(namespace, "tiny", append([]func(*semmoev1.MoEDeployment){func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Routing.SamplePercent = ptr.To[int32](100)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{
			Dataset:      &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "corpus"}},
			SamplingSpec: semmoev1.SamplingSpec{Requests: 60, Tokens: 6000, RequestTokens: 128},
		}
	}}, change...)...)
}

// waitPlanned waits until all replicas serve a plan.
func waitPlanned(t *testing.T, moed *semmoev1.MoEDeployment) *semmoev1.MoEDeployment {
	t.Helper()
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut")
	eventually(t, waitTimeout, "one workload is left", func() error {
		if workloads := listWorkloads(t, moed); len(workloads) != 1 {
			return fmt.Errorf("%d workloads", len(workloads))
		}
		return nil
	})
	return waitComplete(t, moed)
}

// profilingJobs returns the UIDs of the profiling Jobs in a namespace.
func profilingJobs(t *testing.T, namespace string) []string {
	t.Helper()
	var jobs batchv1.JobList
	if err := api.List(t.Context(), &jobs, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentProfile}); err != nil {
		t.Fatal(err)
	}
	var uids []string
	for _, job := range jobs.Items {
		uids = append(uids, string(job.UID))
	}
	return uids
}

// TestPlanLifecycle tests the whole loop: the running deployment is profiled, a plan is made from the profile and rolled out,
// and requests go to the ranks of the plan. No completed work is repeated after a loss.
func TestPlanLifecycle(t *testing.T) {
	t.Parallel()
	whole := t // managers outlive the subtests
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 8))
	moed := profiledDeployment(namespace)
	create(t, moed)
	planned := waitPlanned(t, moed)
	url := serviceURL(t, moed)

	if planned.Status.PlanDigest == "" || planned.Status.LAR == nil || planned.Status.LAR.PredictedMilli == nil || planned.Status.LAR.BaselineMilli == nil {
		t.Fatalf("the status lacks the plan: %+v", planned.Status)
	}
	if baseline, predicted := *planned.Status.LAR.BaselineMilli, *planned.Status.LAR.PredictedMilli; predicted <= baseline {
		t.Errorf("the forecast of the plan is %d, want more than %d of the default placement", predicted, baseline)
	}
	eventually(t, waitTimeout, "requests are routed by the plan", func() error {
		response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"model": "tiny", "prompt": "func main() {", "max_tokens": 4}`))
		if err != nil {
			return err
		}
		response.Body.Close()
		if got := response.Header.Get(router.HeaderPlan); got != planned.Status.PlanDigest {
			return fmt.Errorf("%s is %q, want %q", router.HeaderPlan, got, planned.Status.PlanDigest)
		}
		return nil
	})
	want := endState(t, namespace)
	jobs := profilingJobs(t, namespace)
	if len(jobs) != 1 {
		t.Fatalf("%d profiling Jobs, want one", len(jobs))
	}

	t.Run("a deleted finished Job is not recreated", func(t *testing.T) {
		if err := api.DeleteAllOf(t.Context(), &batchv1.Job{}, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentProfile},
			client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
			t.Fatal(err)
		}
		wipeStatus(t, moed)
		waitPlanned(t, moed)
		if again := profilingJobs(t, namespace); len(again) != 0 {
			t.Errorf("%d profiling Jobs after the finished one was deleted, want none", len(again))
		}
	})
	t.Run("an operator upgrade restarts nothing", func(t *testing.T) {
		before := podUIDs(t, moed)
		stop()
		stop = startManagerOf(whole, nextImage, namespace, nil)
		wipeStatus(t, moed)
		waitPlanned(t, moed)
		if after := podUIDs(t, moed); !slices.Equal(before, after) {
			t.Errorf("the serving pods changed from %v to %v", before, after)
		}
		if again := profilingJobs(t, namespace); len(again) != 0 {
			t.Errorf("%d profiling Jobs after an upgrade, want none", len(again))
		}
		stop()
		stop = startManager(whole, namespace, nil)
	})
	t.Run("a deleted ConfigMap is recreated and is immutable", func(t *testing.T) {
		config := planConfigMap(t, moed)
		if err := api.Delete(t.Context(), config); err != nil {
			t.Fatal(err)
		}
		eventually(t, waitTimeout, "the ConfigMap is recreated", func() error {
			again := &corev1.ConfigMap{}
			if err := api.Get(t.Context(), client.ObjectKeyFromObject(config), again); err != nil {
				return err
			}
			if diff := cmp.Diff(config.Data, again.Data); diff != "" || again.UID == config.UID {
				return fmt.Errorf("the ConfigMap changed: %s", diff)
			}
			return nil
		})
		edit := client.RawPatch("application/merge-patch+json", []byte(`{"data":{"manifest.json":"{}"}}`))
		if err := api.Patch(t.Context(), planConfigMap(t, moed), edit); err == nil || !strings.Contains(err.Error(), "immutable") {
			t.Errorf("editing a plan's ConfigMap returned %v, want an error", err)
		}
	})
	t.Run("a recreated deployment is served under the same plan without another profile", func(t *testing.T) {
		if err := api.Delete(t.Context(), get(t, moed), client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
			t.Fatal(err)
		}
		eventually(t, waitTimeout, "all objects are deleted", func() error {
			for _, list := range kinds() {
				if err := api.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
					return err
				}
				for _, object := range objects(list) {
					if object.GetLabels()[semmoev1.LabelComponent] != "" {
						return fmt.Errorf("%s %s is not deleted", kindOf(object), object.GetName())
					}
				}
			}
			return nil
		})
		create(t, profiledDeployment(namespace))
		again := waitPlanned(t, moed)
		if again.Status.PlanDigest != planned.Status.PlanDigest {
			t.Errorf("the serving plan is %s, was %s", again.Status.PlanDigest, planned.Status.PlanDigest)
		}
		if jobs := profilingJobs(t, namespace); len(jobs) != 0 {
			t.Errorf("%d profiling Jobs after the deployment was recreated, want none", len(jobs))
		}
		got := endState(t, namespace)
		dropProfilingJobs(want)
		dropProfilingJobs(got)
		compare(t, want, got)
	})
}

// dropProfilingJobs removes the finished profiling Job from an end state: the Job is kept in the namespace where it ran
// and is not recreated.
func dropProfilingJobs(state map[string]string) {
	for key := range state {
		if strings.HasPrefix(key, "Job profile-") {
			delete(state, key)
		}
	}
}

// wipeStatus empties the status of the deployment, its profiles and its plans, like a restore from a backup.
func wipeStatus(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	for _, list := range []client.ObjectList{&semmoev1.MoEDeploymentList{}, &semmoev1.AffinityProfileList{}, &semmoev1.PlacementPlanList{}} {
		if err := api.List(t.Context(), list, client.InNamespace(moed.Namespace)); err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(list) {
			if err := api.Status().Patch(t.Context(), object, client.RawPatch("application/merge-patch+json", []byte(`{"status": null}`))); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func planConfigMap(t *testing.T, moed *semmoev1.MoEDeployment) *corev1.ConfigMap {
	t.Helper()
	var list corev1.ConfigMapList
	if err := api.List(t.Context(), &list, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentPlan}); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 1 {
		t.Fatalf("%d ConfigMaps of plans, want one", len(list.Items))
	}
	return &list.Items[0]
}

func podUIDs(t *testing.T, moed *semmoev1.MoEDeployment) []string {
	t.Helper()
	var uids []string
	for _, pod := range listEnginePods(t, moed) {
		uids = append(uids, string(pod.UID))
	}
	slices.Sort(uids)
	return uids
}
