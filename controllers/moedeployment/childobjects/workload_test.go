// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
)

// A workload is created only if the spec and its plans are, on the API server, as they were read.
func TestCreateWorkload(t *testing.T) {
	moed := moedtest.Deployment()
	plan := moedtest.PlanOf("new", "bb", nil)
	for name, tc := range map[string]struct {
		change  func(*testing.T, client.Client)
		created bool
	}{
		"nothing has changed": {func(*testing.T, client.Client) {}, true},
		"the plan has changed outputs": {func(t *testing.T, c client.Client) {
			failed := &semmoev1.PlacementPlan{}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(plan), failed); err != nil {
				t.Fatal(err)
			}
			metav1.SetMetaDataAnnotation(&failed.ObjectMeta, semmoev1.AnnotationOutputChanged+"r1", "another token")
			if err := c.Update(t.Context(), failed); err != nil {
				t.Fatal(err)
			}
		}, false},
		"the plan is deleted": {func(t *testing.T, c client.Client) {
			if err := c.Delete(t.Context(), plan.DeepCopy()); err != nil {
				t.Fatal(err)
			}
		}, true},
		"the spec has changed": {func(t *testing.T, c client.Client) {
			latest := &semmoev1.MoEDeployment{}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(moed), latest); err != nil {
				t.Fatal(err)
			}
			latest.Generation++
			if err := c.Update(t.Context(), latest); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := moedtest.Cluster(t, moed.DeepCopy(), plan.DeepCopy())
			read := &semmoev1.PlacementPlan{}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(plan), read); err != nil {
				t.Fatal(err)
			}
			tc.change(t, c)
			workload, err := revisions.Render(moed, "r1", moedtest.Report(), revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), revisions.Own{Image: "semmoe:1"})
			if err != nil {
				t.Fatal(err)
			}
			err = Writer{Client: c, Live: c}.Write(t.Context(), moed, revisions.CreateWorkload{Workload: workload, Plans: []*semmoev1.PlacementPlan{read}})
			found := c.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: workload.Name}, &appsv1.StatefulSet{})
			if tc.created && (err != nil || found != nil) {
				t.Errorf("error %v; workload: %v", err, found)
			}
			if !tc.created && (!apierrors.IsConflict(err) || writes.IsRefused(err) || !apierrors.IsNotFound(found)) {
				t.Errorf("error %v, want a conflict; workload: %v, want none", err, found)
			}
		})
	}
}

// The record is written once, and removed when the replica is ready.
func TestRecordRecreations(t *testing.T) {
	set := &leaderworkersetv1.LeaderWorkerSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m-r1", UID: "set", CreationTimestamp: metav1.NewTime(moedtest.Start)}}
	set.Spec.Replicas = ptr.To[int32](2)
	w := revisions.LeaderWorkerSet(set)
	c := fake.NewClientBuilder().WithScheme(moedtest.GroupScheme(t)).WithObjects(w.Object).Build()
	if err := c.Get(context.Background(), client.ObjectKeyFromObject(w.Object), w.Object); err != nil {
		t.Fatal(err)
	}
	leader := moedtest.Pod("m-r1-0", "r1", moedtest.InGroup("m-r1", "0", "0"), moedtest.Unready, func(p *corev1.Pod) {
		p.UID, p.DeletionTimestamp = "a", &metav1.Time{Time: moedtest.Start.Add(time.Hour)}
	})
	versions := map[string]bool{}
	record := func(pods ...*corev1.Pod) string {
		t.Helper()
		for _, write := range revisions.RecordRecreations([]*revisions.Workload{w}, pods, nil, moedtest.Start) {
			if err := (Writer{Client: c}).Write(t.Context(), nil, write); err != nil {
				t.Fatal(err)
			}
		}
		versions[w.ResourceVersion] = true
		return w.Annotations[semmoev1.AnnotationRecreatedReplicas]
	}
	if reported := record(); reported != "" {
		t.Errorf("recorded %q without a pod", reported)
	}
	for range 2 {
		if reported := record(leader); !strings.Contains(reported, `"m-r1-0":{"leader":"a","times":1`) {
			t.Errorf("recorded %q", reported)
		}
	}
	if reported := record(moedtest.Pod("m-r1-0", "r1", moedtest.InGroup("m-r1", "0", "0"))); reported != "" {
		t.Errorf("recorded %q for a ready replica", reported)
	}
	if len(versions) != 3 {
		t.Errorf("%d versions, want 3: it is written and removed once", len(versions))
	}
}
