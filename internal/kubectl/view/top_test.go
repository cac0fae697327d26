// SPDX-License-Identifier: Apache-2.0

package view

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// TestRanksOfRequests verifies that ranks are shown if routers send requests to ranks, also before the first request.
// Otherwise a note explains that the load by rank is unknown.
func TestRanksOfRequests(t *testing.T) {
	for name, test := range map[string]struct {
		attention semmoev1.AttentionParallelism
		tokens    map[string]float64
		ranks     int
	}{
		"requests to ranks":            {semmoev1.AttentionDataParallel, map[string]float64{"0": 60, "1": 40}, 2},
		"no requests yet":              {semmoev1.AttentionDataParallel, nil, 2},
		"some requests without a rank": {semmoev1.AttentionDataParallel, map[string]float64{"1": 40, "none": 20}, 2},
		"engines accept no rank":       {semmoev1.AttentionDataParallel, map[string]float64{"none": 20}, 0},
		"tensor parallel":              {semmoev1.AttentionTensorParallel, map[string]float64{"none": 20}, 0},
		"tensor parallel, no requests": {semmoev1.AttentionTensorParallel, nil, 0},
	} {
		moed := &semmoev1.MoEDeployment{Spec: semmoev1.MoEDeploymentSpec{Parallelism: semmoev1.ParallelismSpec{Attention: test.attention, ExpertParallelSize: 2}}}
		load := Top(moed, map[string]RouterMetrics{"a": {Answered: 3, Tokens: test.tokens}}, nil, nil)
		if noted := len(load.Notes) > 0; len(load.Ranks) != test.ranks || noted != (test.ranks == 0) {
			t.Errorf("%s: ranks %v, notes %q; want %d ranks", name, load.Ranks, load.Notes, test.ranks)
		}
	}
}

// TestRanksOfServingRevision verifies that the number of ranks is taken from the revision in service, also if the spec
// has a different number.
func TestRanksOfServingRevision(t *testing.T) {
	moed := &semmoev1.MoEDeployment{Spec: semmoev1.MoEDeploymentSpec{Parallelism: semmoev1.ParallelismSpec{Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 5}}}
	moed.Status.Serving = &semmoev1.ServingStatus{Revision: "r1", Ranks: 4}
	load := Top(moed, map[string]RouterMetrics{"a": {Answered: 3, Tokens: map[string]float64{"0": 60}}}, nil, nil)
	if len(load.Ranks) != 4 {
		t.Errorf("%d ranks, want the 4 ranks of the revision in service", len(load.Ranks))
	}
}

// TestStages verifies that the serving revision is in service, and that the desired revision is starting until one of
// its replicas is ready.
func TestStages(t *testing.T) {
	moed := &semmoev1.MoEDeployment{Status: semmoev1.MoEDeploymentStatus{Revision: "new", Serving: &semmoev1.ServingStatus{Revision: "old"}}}
	for revision, want := range map[string]string{"old": stageInService, "new": stageStarting, "older": stageRetired} {
		if got := (Objects{Deployment: moed}).stage(revision, &metav1.ObjectMeta{}); got != want {
			t.Errorf("revision %s is %s, want %s", revision, got, want)
		}
	}
	moed.Status.Serving = nil // as in earlier releases of the operator
	if got := (Objects{Deployment: moed}).stage("new", &metav1.ObjectMeta{}); got != stageInService {
		t.Errorf("without status.serving the revision is %s", got)
	}
}
