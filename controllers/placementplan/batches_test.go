// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/solver"
)

// TestBatchSizes checks that first plans and plans that replace another plan use the same batch sizes.
func TestBatchSizes(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue}},
		Result:     &semmoev1.ProfileResult{Digest: strings.Repeat("ab", 32)},
	}}
	for name, tc := range map[string]struct {
		change func(*semmoev1.PlacementPlanSpec)
		want   []int
	}{
		"default":  {func(*semmoev1.PlacementPlanSpec) {}, solver.DefaultBatchTokens},
		"observed": {func(s *semmoev1.PlacementPlanSpec) { s.ObservedBatchTokens = []int32{64, 64, 4096} }, []int{64, 64, 4096}},
		"number":   {func(s *semmoev1.PlacementPlanSpec) { s.BatchTokens = 512 }, []int{512}},
	} {
		for _, current := range []*semmoev1.CurrentPlan{nil, {PlanDigest: "0"}} {
			plan := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ExpertParallelSize: 4, Current: current}}
			tc.change(&plan.Spec)
			in := inputsOf(plan, profile, nil, machines.ResolvedProfile{})
			if got := in.options(nil).BatchTokens; !slices.Equal(got, tc.want) {
				t.Errorf("%s, current %v: batch sizes = %v, want %v", name, current, got, tc.want)
			}
			if current == nil {
				continue
			}
			if got := (&task{inputs: *in}).replanOptions(nil).ReplanPolicy.BatchTokens; !slices.Equal(got, tc.want) {
				t.Errorf("%s: evaluation at %v, want %v", name, got, tc.want)
			}
		}
	}
}
