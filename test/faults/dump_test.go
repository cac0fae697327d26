// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

var dumped = []client.ObjectList{&corev1.ConfigMapList{}, &appsv1.DeploymentList{}, &semmoev1.MoEDeploymentList{}}

func fakeClient(t *testing.T) client.WithWatch {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	if err := semmoev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	return fake.NewClientBuilder().WithScheme(scheme).Build()
}

// world returns a MoEDeployment, its router Deployment, and a ConfigMap in a namespace.
func world(namespace, uid string, change func(*semmoev1.MoEDeployment, *appsv1.Deployment, *corev1.ConfigMap)) []client.Object {
	moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "m", UID: types.UID("m-" + uid)}}
	moed.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Serving", Message: uid}, {Type: followsTraffic, Status: metav1.ConditionUnknown, Reason: uid}}
	owner := metav1.OwnerReference{APIVersion: "semmoe.io/v1alpha1", Kind: "MoEDeployment", Name: "m", UID: moed.UID}
	router := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "r", UID: types.UID("r-" + uid), OwnerReferences: []metav1.OwnerReference{owner}}}
	router.Spec.Template.Annotations = map[string]string{"owner": string(moed.UID), "namespace": namespace}
	configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "c", CreationTimestamp: metav1.NewTime(time.Now())}, Data: map[string]string{"a": "b"}}
	if change != nil {
		change(moed, router, configMap)
	}
	return []client.Object{moed, router, configMap}
}

// TestDump checks that a dump contains everything that the operator decides, and nothing that differs between two runs.
func TestDump(t *testing.T) {
	c := fakeClient(t)
	dump := func(namespace, uid string, change func(*semmoev1.MoEDeployment, *appsv1.Deployment, *corev1.ConfigMap)) map[string]string {
		t.Helper()
		for _, object := range world(namespace, uid, change) {
			if err := c.Create(t.Context(), object); err != nil {
				t.Fatal(err)
			}
		}
		state, err := Dump(t.Context(), c, namespace, dumped)
		if err != nil {
			t.Fatal(err)
		}
		return state
	}
	differs := func(a, b map[string]string) (names []string) {
		for name := range a {
			if a[name] != b[name] {
				names = append(names, name)
			}
		}
		return names
	}
	clean := dump("one", "1", nil)
	if len(clean) != 3 {
		t.Fatalf("%d objects in %v", len(clean), clean)
	}
	touched := dump("two", "2", func(m *semmoev1.MoEDeployment, r *appsv1.Deployment, _ *corev1.ConfigMap) {
		m.Annotations = map[string]string{ForeignAnnotation: "1"}
		r.Annotations = map[string]string{"deployment.kubernetes.io/revision": "3"}
		r.Generation = 7
	})
	if got := differs(clean, touched); len(got) > 0 {
		t.Errorf("%v differ:\n%v\n%v", got, clean, touched)
	}
	n := 0
	for want, change := range map[string]func(*semmoev1.MoEDeployment, *appsv1.Deployment, *corev1.ConfigMap){
		"ConfigMap c": func(_ *semmoev1.MoEDeployment, _ *appsv1.Deployment, c *corev1.ConfigMap) { c.Data["a"] = "c" },
		"MoEDeployment m": func(m *semmoev1.MoEDeployment, _ *appsv1.Deployment, _ *corev1.ConfigMap) {
			m.Status.Conditions[0].Reason = "Other"
		},
		"Deployment r": func(_ *semmoev1.MoEDeployment, r *appsv1.Deployment, _ *corev1.ConfigMap) { r.OwnerReferences = nil },
	} {
		n++
		if got := strings.Join(differs(clean, dump(fmt.Sprintf("changed-%d", n), "1", change)), ", "); got != want {
			t.Errorf("%s differs, want %s", got, want)
		}
	}
	// The UID of a deleted object is not replaced with the name of another object.
	stale := dump("stale", "1", func(_ *semmoev1.MoEDeployment, r *appsv1.Deployment, _ *corev1.ConfigMap) {
		r.Spec.Template.Annotations["owner"] = "m-0"
	})
	if got := strings.Join(differs(clean, stale), ", "); got != "Deployment r" {
		t.Errorf("%q differs, want the router with the UID of a deleted owner", got)
	}
}

// TestJournal checks that a Journal records deletions followed by creations, and temporary Degraded conditions.
func TestJournal(t *testing.T) {
	j := newJournal()
	for _, e := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted, watch.Added} {
		j.note(e, "ConfigMap c")
	}
	j.note(watch.Deleted, "Service s")
	j.note(watch.Added, "ConfigMap kube-root-ca.crt")
	moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Name: "m"}}
	for _, status := range []metav1.ConditionStatus{metav1.ConditionFalse, metav1.ConditionTrue, metav1.ConditionFalse} {
		moed.Status.Conditions = []metav1.Condition{{Type: "Degraded", Status: status, Reason: "Trouble"}, {Type: "Ready", Status: status, Reason: "Serving"}}
		j.recordProblems("MoEDeployment m", moed)
	}
	counts, err := j.Counts()
	if err != nil || len(counts) != 2 || counts["ConfigMap c"] != "made 2 times, deleted 1 times" || counts["Service s"] != "made 0 times, deleted 1 times" {
		t.Errorf("counts %v, %v", counts, err)
	}
	if got := strings.Join(j.Problems(), ", "); got != "MoEDeployment m: Degraded True Trouble" {
		t.Errorf("problems %q", got)
	}
	if got := j.Created(func(object string) bool { return strings.HasPrefix(object, "ConfigMap ") }); got != 2 {
		t.Errorf("%d ConfigMaps were made, want 2", got)
	}
	j.fail(errors.New("a gap"))
	if _, err := j.Counts(); err == nil {
		t.Error("Counts reports no error for a gap in the record")
	}
}

// TestJournalAcrossAGap checks that creations and deletions during a gap of the watch are detected by UID.
func TestJournalAcrossAGap(t *testing.T) {
	c := fakeClient(t)
	object := func(name, uid string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "one", Name: name, UID: types.UID(uid)}}
	}
	j := newJournal()
	f := &follower{journal: j, client: c, namespace: "one", kind: &corev1.ConfigMapList{}, known: map[types.UID]string{"1": "ConfigMap stays", "2": "ConfigMap goes", "3": "ConfigMap again"}}
	for _, there := range []*corev1.ConfigMap{object("stays", "1"), object("again", "4"), object("comes", "5")} {
		if err := c.Create(t.Context(), there); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if _, err := f.list(t.Context(), j.note); err != nil {
			t.Fatal(err)
		}
	}
	counts, err := j.Counts()
	if err != nil || len(counts) != 3 || counts["ConfigMap goes"] != "made 0 times, deleted 1 times" ||
		counts["ConfigMap again"] != "made 1 times, deleted 1 times" || counts["ConfigMap comes"] != "made 1 times, deleted 0 times" {
		t.Errorf("counts %v, %v", counts, err)
	}
}

// TestDumpLeavesOutFigures checks that a dump contains the reason of a failure without figures, and a live profile
// without its start time.
func TestDumpLeavesOutFigures(t *testing.T) {
	c := fakeClient(t)
	kinds := []client.ObjectList{&semmoev1.PlacementPlanList{}, &semmoev1.AffinityProfileList{}}
	dump := func(namespace, failure string, since time.Time, samples semmoev1.LiveSamples) map[string]string {
		t.Helper()
		plan := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p", Annotations: map[string]string{semmoev1.AnnotationFailed + "abc": failure}}}
		profile := &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "a"}}
		profile.Spec.Live = &semmoev1.LiveSpec{Samples: samples, Since: &metav1.Time{Time: since}}
		for _, object := range []client.Object{plan, profile} {
			if err := c.Create(t.Context(), object); err != nil {
				t.Fatal(err)
			}
		}
		state, err := Dump(t.Context(), c, namespace, kinds)
		if err != nil {
			t.Fatal(err)
		}
		return state
	}
	now := time.Now().Truncate(time.Second)
	first := dump("one", "LocalityWorse: 20% against 40%", now, semmoev1.LiveSamplesCounts)
	if second := dump("two", "LocalityWorse: 21% against 43%", now.Add(time.Hour), semmoev1.LiveSamplesCounts); !maps.Equal(first, second) {
		t.Errorf("dumps that differ only in figures are not equal:\n%v\n%v", first, second)
	}
	third := dump("three", "MoreFailures: 1 of 2", now, semmoev1.LiveSamplesSequences)
	for name := range first {
		if first[name] == third[name] {
			t.Errorf("the dump of %s does not depend on the reason or the samples", name)
		}
	}
}

func TestRename(t *testing.T) {
	state := map[string]string{
		"ConfigMap plan-12ab": `{"annotations": {"semmoe.io/report": "figures", "semmoe.io/plan-digest": "12ab34cd"}, "data": {"a": "b"}}`,
		"ConfigMap other":     `{"data": {"a": "of 12ab34cd"}}`,
		"StatefulSet s":       `{"digest": "12ab34cd", "short": "12ab"}`,
	}
	got := Rename(state, map[string]string{"plan-12ab": "CONFIG", "12ab": "SHORT", "12ab34cd": "DIGEST"})
	want := map[string]string{
		"ConfigMap CONFIG": "{\n \"annotations\": {\n  \"semmoe.io/plan-digest\": \"DIGEST\"\n }\n}",
		"ConfigMap other":  `{"data": {"a": "of DIGEST"}}`,
		"StatefulSet s":    `{"digest": "DIGEST", "short": "SHORT"}`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	record := map[string]string{"ConfigMap plan-12ab": "made 1 times, deleted 0 times"}
	if got := Rename(record, map[string]string{"plan-12ab": "CONFIG"}); got["ConfigMap CONFIG"] != "made 1 times, deleted 0 times" {
		t.Errorf("the renamed record is %v", got)
	}
}
