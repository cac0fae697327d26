// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"slices"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/observation/stepsizes"
)

// TestSizesForPlans checks for which deployments batch sizes are read, and that plans are made for those of the spec where
// it has any: with shuffled tokens the sizes are read for the predicted rate all the same.
func TestSizesForPlans(t *testing.T) {
	fixed := func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.BatchTokens = 512 }
	shuffled := func(m *semmoev1.MoEDeployment) {
		m.Spec.Parallelism.Attention, m.Spec.Placement.TokenShuffle = semmoev1.AttentionTensorParallel, semmoev1.TokenShuffleEnabled
	}
	for name, test := range map[string]struct {
		change        []func(*semmoev1.MoEDeployment)
		read, planned bool
	}{
		"sizes of engines":                       {nil, true, true},
		"sizes of the spec":                      {[]func(*semmoev1.MoEDeployment){fixed}, false, false},
		"shuffled tokens":                        {[]func(*semmoev1.MoEDeployment){shuffled}, true, true},
		"shuffled tokens, sizes of the spec":     {[]func(*semmoev1.MoEDeployment){fixed, shuffled}, true, false},
		"shuffled tokens without request router": {[]func(*semmoev1.MoEDeployment){shuffled, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone }}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment(append(test.change, func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = &semmoev1.ProfilingSpec{} })...)
			if got := desired.ObservesSteps(moed); got != test.read {
				t.Errorf("sizes are read: %v, want %v", got, test.read)
			}
			var s Snapshot
			s.Moed = moed
			d := Decision{Steps: stepsizes.Sum{Sizes: []int32{64}}}
			if got := slices.Equal(d.sizesForPlans(&s), []int32{64}); got != test.planned {
				t.Errorf("plans are made for observed sizes: %v, want %v", got, test.planned)
			}
		})
	}
}
