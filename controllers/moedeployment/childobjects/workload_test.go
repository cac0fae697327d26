// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

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
