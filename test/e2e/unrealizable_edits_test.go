// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// served contains the status fields that describe the serving engine and plan.
type served struct {
	Serving              *semmoev1.ServingStatus
	PlanDigest, Baseline string
	Predicted            *int32
}

func servedOf(moed *semmoev1.MoEDeployment) served {
	d := served{Serving: moed.Status.Serving, PlanDigest: moed.Status.PlanDigest}
	if lar := moed.Status.LAR; lar != nil {
		d.Baseline, d.Predicted = lar.BaselineSummary, lar.PredictedMilli
	}
	return d
}

// TestUnrealizableEdits makes edits that cannot be realized. The status fields of the serving revision, its
// plan and its rates do not change. The profile and plan fields stay while the new spec has no plan. After the edit is
// reverted, the status is as before.
func TestUnrealizableEdits(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := newDeployment(namespace, "m", func(m *semmoev1.MoEDeployment) {
		m.Spec.Replicas = ptr.To[int32](2)
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
		m.Spec.Rollout.SoakSeconds = ptr.To[int32](0)
	})
	create(t, moed)
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut")
	original := waitComplete(t, moed)
	want := servedOf(original)
	if want.PlanDigest == "" || want.Baseline == "" || want.Serving == nil || want.Serving.Revision != original.Status.Revision || want.Serving.Ranks != 4 {
		t.Fatalf("before any edit: %+v", want)
	}
	for _, edit := range []struct {
		name, reason string
		change       func(*semmoev1.MoEDeploymentSpec)
		// unplanned reports whether the edited spec has no plan.
		unplanned bool
	}{
		{"an EP size that does not divide the number of experts", "InvalidExpertParallelSize", func(s *semmoev1.MoEDeploymentSpec) { s.Parallelism.ExpertParallelSize = 5 }, true},
		{"a flag managed by the operator", "ContradictingFlags", func(s *semmoev1.MoEDeploymentSpec) { s.Engine.Args = append(s.Engine.Args, "--ep-size=2") }, true},
		{"a path without a model", "ModelInvalid", func(s *semmoev1.MoEDeploymentSpec) { s.Model.Path = "/models/nowhere" }, true},
		{"an image that does not exist", "ImagePullFailed", func(s *semmoev1.MoEDeploymentSpec) { s.Engine.Image = "nobody.invalid/engine:1" }, false},
		{"more ranks than devices", "Unschedulable", func(s *semmoev1.MoEDeploymentSpec) {
			s.Parallelism.ExpertParallelSize, s.Parallelism.ResourceName = 8, "example.com/none"
		}, false},
	} {
		update(t, moed, func(m *semmoev1.MoEDeployment) { edit.change(&m.Spec) })
		waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, edit.reason)
		eventually(t, waitTimeout, edit.name, func() error {
			latest := get(t, moed)
			if diff := cmp.Diff(want, servedOf(latest)); diff != "" {
				return fmt.Errorf("the serving status changed (-want +got):\n%s", diff)
			}
			if !edit.unplanned {
				return nil
			}
			for _, kind := range []string{semmoev1.ConditionProfiled, semmoev1.ConditionPlanned} {
				if !meta.IsStatusConditionTrue(latest.Status.Conditions, kind) {
					return fmt.Errorf("%s: %+v", kind, meta.FindStatusCondition(latest.Status.Conditions, kind))
				}
			}
			if latest.Status.Plan != original.Status.Plan || latest.Status.Profile != original.Status.Profile {
				return errors.New("the plan or profile in the status changed")
			}
			return nil
		})
		if edit.unplanned {
			waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "NotInService", want.PlanDigest, want.Serving.Revision)
		}
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec = *original.Spec.DeepCopy() })
		if after := servedOf(waitComplete(t, moed)); !cmp.Equal(want, after) {
			t.Errorf("after reverting %s (-want +got): %s", edit.name, cmp.Diff(want, after))
		}
	}
}
