// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// The status has the settings of the serving revision, and the decision on them.
func TestOverlapStatus(t *testing.T) {
	auto := moedtest.Deployment(moedtest.OverlapAuto(semmoev1.EngineVLLM))
	held := decision.Decision{Planning: planner.Planning{Overlap: planner.Overlap{Why: desired.Finding{Reason: "AwaitingApproval", Message: "m", Pending: "bb"}}}}
	served := &revisions.Layout{
		Overlap:      semmoev1.OverlapSpec{MicroBatches: 2, DecodeThresholdTokens: 2048, PrefillThresholdTokens: 2048, CommunicationSMs: 16},
		OverlapBasis: `{"batchTokens":[65536],"layerNanos":4600,"unsplitNanos":5500,"reason":"Overlapping","message":"x"}`,
	}
	for name, tc := range map[string]struct {
		moed *semmoev1.MoEDeployment
		o    observation
		want *semmoev1.OverlapStatus
	}{
		"manual":  {moedtest.Deployment(), observation{Decision: held, Served: served}, nil},
		"no plan": {auto, observation{}, &semmoev1.OverlapStatus{Reason: "NoPlan", Message: planner.OverlapWhy(nil).Message}},
		"in use, and others wait": {auto, observation{Decision: held, Served: served}, &semmoev1.OverlapStatus{
			MicroBatches: 2, ThresholdTokens: 2048, CommunicationSMs: 16, BatchTokens: []int32{65536}, LayerNanos: 4600, UnsplitNanos: 5500, Reason: "AwaitingApproval", Message: "m",
		}},
		"an edited basis": {auto, observation{Decision: held, Served: &revisions.Layout{Overlap: served.Overlap, OverlapBasis: "{"}}, &semmoev1.OverlapStatus{
			MicroBatches: 2, ThresholdTokens: 2048, CommunicationSMs: 16, Reason: "AwaitingApproval", Message: "m",
		}},
	} {
		if diff := cmp.Diff(tc.want, overlapStatus(tc.moed, tc.o)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if pending := pendingPlan(observation{Decision: held}); pending != "bb" {
		t.Errorf("pending plan %q", pending)
	}
}
