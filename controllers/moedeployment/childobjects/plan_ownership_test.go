// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"cmp"
	"context"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/ownership"
)

// under returns the workload of a revision under the plan, which may be nil, as stored by the API server.
func under(t *testing.T, uid types.UID, plan *semmoev1.PlacementPlan, change ...func(*semmoev1.MoEDeployment)) *revisions.Workload {
	t.Helper()
	var layout *revisions.Layout
	if plan != nil {
		layout = revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	}
	w, err := revisions.Render(moedtest.Deployment(change...), string(uid), moedtest.Report(), layout, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	w.UID = uid
	return w
}

// Each workload owns the ConfigMap of its plan, once, in addition to the plan. The ConfigMap exists while one of the
// workloads does.
func TestWorkloadsKeepTheirPlan(t *testing.T) {
	plan := moedtest.PlanOf("p", "ab", func(p *semmoev1.PlacementPlan) { p.UID = "plan" })
	ofPlan := ownership.ControllerReference(plan, "PlacementPlan")
	owner := func(apiVersion, kind, name string) metav1.OwnerReference {
		return metav1.OwnerReference{APIVersion: apiVersion, Kind: kind, Name: "m-" + name, UID: types.UID(name)}
	}
	r1, r2 := owner("apps/v1", "StatefulSet", "r1"), owner("apps/v1", "StatefulSet", "r2")
	for name, tc := range map[string]struct {
		workloads []*revisions.Workload
		owners    []metav1.OwnerReference
		want      []metav1.OwnerReference
		writes    int
	}{
		"owned by the plan":                  {[]*revisions.Workload{under(t, "r1", plan)}, ofPlan, append(ofPlan[:1:1], r1), 1},
		"of two revisions":                   {[]*revisions.Workload{under(t, "r1", plan), under(t, "r2", plan)}, ofPlan, append(ofPlan[:1:1], r1, r2), 2},
		"the plan is deleted":                {[]*revisions.Workload{under(t, "r2", plan)}, []metav1.OwnerReference{r1}, []metav1.OwnerReference{r1, r2}, 1},
		"already kept":                       {[]*revisions.Workload{under(t, "r1", plan)}, append(ofPlan[:1:1], r1), append(ofPlan[:1:1], r1), 0},
		"of groups":                          {[]*revisions.Workload{under(t, "r1", plan, moedtest.TwoPods)}, ofPlan, append(ofPlan[:1:1], owner("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "r1")), 1},
		"without a plan":                     {[]*revisions.Workload{under(t, "r1", nil)}, ofPlan, ofPlan, 0},
		"restored, without an owner":         {[]*revisions.Workload{under(t, "r1", plan)}, nil, nil, 0},
		"a workload that is not created yet": {[]*revisions.Workload{under(t, "", plan)}, ofPlan, ofPlan, 0},
	} {
		t.Run(name, func(t *testing.T) {
			configMap := &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: plan.Status.ConfigMap, UID: "configmap", OwnerReferences: tc.owners},
				Immutable:  new(true), Data: map[string]string{"placement.json": "{}"},
			}
			writes := 0
			c := interceptor.NewClient(moedtest.Cluster(t, configMap), interceptor.Funcs{
				Patch: func(ctx context.Context, c client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
					writes++
					return c.Patch(ctx, object, patch, options...)
				},
			})
			for range 2 { // the second call is a no-op
				for _, w := range tc.workloads {
					if err := (Writer{Client: c}).Write(t.Context(), nil, revisions.KeepPlan{Workload: w}); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(configMap), configMap); err != nil {
				t.Fatal(err)
			}
			// The order of owners is not significant.
			slices.SortFunc(configMap.OwnerReferences, func(a, b metav1.OwnerReference) int { return cmp.Compare(a.UID, b.UID) })
			if diff := gocmp.Diff(tc.want, configMap.OwnerReferences); diff != "" || writes != tc.writes || len(configMap.Data) != 1 {
				t.Errorf("%d writes, want %d; data %v; owners (-want +got):\n%s", writes, tc.writes, configMap.Data, diff)
			}
		})
	}
	if err := (Writer{Client: moedtest.Cluster(t)}).Write(t.Context(), nil, revisions.KeepPlan{Workload: under(t, "r1", plan)}); err != nil {
		t.Errorf("of a ConfigMap that is not there: %v", err)
	}
}
