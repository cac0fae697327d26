// SPDX-License-Identifier: Apache-2.0

package change

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// A profile of traffic has no plan that could choose the overlap settings, and its API refuses mode Auto.
func TestReplanWithChosenOverlap(t *testing.T) {
	moed := sampled()
	moed.Spec.Engine.Overlap = &semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}
	layout := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ProfileRef: semmoev1.ProfileReference{Name: "p"}}}
	traced := map[string]*semmoev1.AffinityProfile{"p": {Status: semmoev1.AffinityProfileStatus{Result: &semmoev1.ProfileResult{TracedTokens: 200}}}}
	profile, _, err := Replan(moed, InService{Plan: layout, Profiles: traced}, time.Unix(0, 0), time.Unix(3600, 0))
	if err != nil || profile.Spec.Engine.Overlap != nil {
		t.Errorf("%+v, error %v", profile, err)
	}
}

// Overlap settings that wait are approved by the plan whose batch sizes they are for, although the plan gains nothing.
func TestApproveOverlap(t *testing.T) {
	plan := semmoev1.PlacementPlan{}
	plan.Name, plan.Namespace, plan.Status.Plan, plan.Status.Verdict = "m-b", "ns", "bb", semmoev1.VerdictNoGainExpected
	plans := []semmoev1.PlacementPlan{plan}
	for reason, waits := range map[string]bool{"AwaitingApproval": true, "RolloutInterruptsService": true, "Overlapping": false} {
		moed := &semmoev1.MoEDeployment{}
		moed.Name, moed.Namespace = "m", "ns"
		moed.Spec.Placement.Approval = semmoev1.ApprovalManual
		moed.Status.PendingPlan, moed.Status.Overlap = "bb", &semmoev1.OverlapStatus{Reason: reason}
		c, err := Approve(moed, plans, &plans[0])
		if !waits {
			if err == nil || !strings.Contains(err.Error(), "promises no gain") {
				t.Errorf("%s: %v", reason, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", reason, err)
		}
		want := map[string]any{"metadata": map[string]any{"annotations": map[string]any{semmoev1.AnnotationApprove: "bb"}}}
		if diff := cmp.Diff(want, c.Patch); diff != "" || !strings.Contains(c.Done, "overlap settings at the batch sizes of plan bb") {
			t.Errorf("%s: %s (-want +got):\n%s", reason, c.Done, diff)
		}
		moed.Annotations = map[string]string{semmoev1.AnnotationApprove: "bb"}
		if c, err := Approve(moed, plans, &plans[0]); err != nil || c.Patch != nil {
			t.Errorf("%s, again: %v, %v", reason, c.Patch, err)
		}
	}
}
