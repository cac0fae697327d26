// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/source"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// Groups are scaled and deleted like StatefulSets. An old group is deleted only when none of its leaders is left,
// regardless of its status, and only according to the latest spec.
func TestGroupsAreScaled(t *testing.T) {
	moed, found := moedtest.Deployment(moedtest.TwoPods), moedtest.Report()
	o := observation{Decision: decision.Decision{Revision: revisions.Of(moed, found, nil)}, Inspection: inspection.State{Report: &found}}
	c := moedtest.Cluster(t, moed.DeepCopy())
	r := &Reconciler{Client: c, Live: c, Recorder: events.NewFakeRecorder(16), Image: "semmoe:1"}
	reconcile := func(workloads ...*revisions.Workload) {
		t.Helper()
		if moved := rolloutOf(moed, o, workloads, moedtest.Start); moved.Err != nil || r.write(t.Context(), moed, moved.Writes...) != nil {
			t.Fatalf("failed to write %+v", moved)
		}
	}
	read := func(name string) (*revisions.Workload, error) {
		set := &leaderworkersetv1.LeaderWorkerSet{}
		err := c.Get(context.Background(), client.ObjectKey{Namespace: "ns", Name: name}, set)
		return revisions.LeaderWorkerSet(set), err
	}
	reconcile()
	created, err := read("m-" + o.Revision)
	if err != nil || *created.Replicas() != 2 {
		t.Fatalf("error %v, %d replicas", err, *created.Replicas())
	}
	// The fake client sets no UID, which marks a workload as existing.
	created.UID = "uid-1"
	moed.Spec.Replicas = ptr.To[int32](3)
	reconcile(created)
	if scaled, err := read(created.Name); err != nil || *scaled.Replicas() != 3 {
		t.Errorf("error %v, %d replicas, want 3", err, *scaled.Replicas())
	}

	old := created.Object.DeepCopyObject().(*leaderworkersetv1.LeaderWorkerSet)
	old.Name, old.UID, old.ResourceVersion, old.Spec.Replicas = "m-old", "uid-2", "", ptr.To[int32](0)
	if err := c.Create(context.Background(), old); err != nil {
		t.Fatal(err)
	}
	left := moedtest.Pod("m-old-0", "old", moedtest.InGroup("m-old", "0", "0"), func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: moedtest.Start} })
	current, err := read(created.Name)
	if err != nil {
		t.Fatal(err)
	}
	current.UID = "uid-1"
	o.Pods = []*corev1.Pod{left}
	reconcile(current, revisions.LeaderWorkerSet(old))
	if _, err := read("m-old"); err != nil {
		t.Errorf("it is gone before its last pod is: %v", err)
	}
	o.Pods = nil
	moed.Generation--
	reconcile(current, revisions.LeaderWorkerSet(old))
	if _, err := read("m-old"); err != nil {
		t.Errorf("it is gone by a spec that is not the latest: %v", err)
	}
	moed.Generation++
	reconcile(current, revisions.LeaderWorkerSet(old))
	if _, err := read("m-old"); !apierrors.IsNotFound(err) {
		t.Errorf("it is left: %v", err)
	}

	unknown := observation{Inspection: o.Inspection} // for example while a checkpoint is inspected again
	for _, write := range rolloutOf(moed, unknown, []*revisions.Workload{revisions.LeaderWorkerSet(old)}, moedtest.Start).Writes {
		if _, deleted := write.(writes.Delete); deleted {
			t.Error("the only workload that identifies the serving revision is deleted")
		}
	}

	moed.Spec.Replicas = ptr.To[int32](5)
	o.Workers = []*corev1.Pod{moedtest.Pod(current.Name+"-4-1", o.Revision, moedtest.InGroup(current.Name, "4", "1"))}
	reconcile(current)
	if scaled, err := read(current.Name); err != nil || *scaled.Replicas() != 4 {
		t.Errorf("error %v, %d replicas, want 4 while a worker of an earlier fifth one is left", err, *scaled.Replicas())
	}
}

// The kind LeaderWorkerSet is checked for once, and repeatedly while wanted. It is watched once found.
func TestGroupKindIsInstalled(t *testing.T) {
	mapper := meta.NewDefaultRESTMapper(nil)
	c := fake.NewClientBuilder().WithScheme(moedtest.GroupScheme(t)).WithRESTMapper(mapper).Build()
	watched := 0
	k := &groupKind{watch: func(source.Source) error { watched++; return nil }}
	find := func(wanted bool, after time.Duration) bool {
		t.Helper()
		known, err := k.find(context.Background(), c, wanted, moedtest.Start.Add(after))
		if err != nil {
			t.Fatal(err)
		}
		return known
	}
	if find(true, 0) {
		t.Error("it is known before it is there")
	}
	mapper.Add(leaderworkersetv1.GroupVersion.WithKind("LeaderWorkerSet"), meta.RESTScopeNamespace)
	if find(true, time.Second) || find(false, time.Hour) {
		t.Error("the kind is checked for too early, or although it is not wanted")
	}
	mapper.Add(semmoev1.GroupVersion.WithKind("MoEDeployment"), meta.RESTScopeNamespace)
	if !find(true, groupKindPeriod) || !find(false, groupKindPeriod) || watched != 1 {
		t.Errorf("watched %d times", watched)
	}
	failing := &groupKind{watch: func(source.Source) error { return errors.New("no watch") }}
	if known, err := failing.find(context.Background(), c, true, moedtest.Start); known || err == nil {
		t.Errorf("known %v, error %v", known, err)
	}
}
