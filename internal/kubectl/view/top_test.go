package view

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// Ranks are told where requests have them, also while there are none; elsewhere it is said that they have none.
func TestRanksOfRequests(t *testing.T) {
	for name, test := range map[string]struct {
		attention semmoev1.AttentionParallelism
		tokens    map[string]float64
		ranks     int
	}{
		"to ranks":                     {semmoev1.AttentionDataParallel, map[string]float64{"0": 60, "1": 40}, 2},
		"nothing yet":                  {semmoev1.AttentionDataParallel, nil, 2},
		"some before there were ranks": {semmoev1.AttentionDataParallel, map[string]float64{"1": 40, "none": 20}, 2},
		"engines take no rank":         {semmoev1.AttentionDataParallel, map[string]float64{"none": 20}, 0},
		"of tokens":                    {semmoev1.AttentionTensorParallel, map[string]float64{"none": 20}, 0},
		"of tokens, nothing yet":       {semmoev1.AttentionTensorParallel, nil, 0},
	} {
		moed := &semmoev1.MoEDeployment{Spec: semmoev1.MoEDeploymentSpec{Parallelism: semmoev1.ParallelismSpec{Attention: test.attention, ExpertParallelSize: 2}}}
		load := Top(moed, map[string]Routed{"a": {Answered: 3, Tokens: test.tokens}}, nil, nil)
		if said := len(load.Notes) > 0; len(load.Ranks) != test.ranks || said != (test.ranks == 0) {
			t.Errorf("%s: ranks %v, notes %q; want %d ranks", name, load.Ranks, load.Notes, test.ranks)
		}
	}
}

// A spec that cannot be realised adds no rank to what serves.
func TestRanksOfWhatServes(t *testing.T) {
	moed := &semmoev1.MoEDeployment{Spec: semmoev1.MoEDeploymentSpec{Parallelism: semmoev1.ParallelismSpec{Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 5}}}
	moed.Status.Serving = &semmoev1.ServingStatus{Revision: "r1", Ranks: 4}
	load := Top(moed, map[string]Routed{"a": {Answered: 3, Tokens: map[string]float64{"0": 60}}}, nil, nil)
	if len(load.Ranks) != 4 {
		t.Errorf("%d ranks are shown, want the 4 that serve", len(load.Ranks))
	}
}

// The revision that answers requests is in service, and the one that the spec asks for starts until a replica of it is ready.
func TestStages(t *testing.T) {
	moed := &semmoev1.MoEDeployment{Status: semmoev1.MoEDeploymentStatus{Revision: "new", Serving: &semmoev1.ServingStatus{Revision: "old"}}}
	for revision, want := range map[string]string{"old": stageInService, "new": stageStarting, "older": stageRetired} {
		if got := (Objects{Deployment: moed}).stage(revision, &metav1.ObjectMeta{}); got != want {
			t.Errorf("revision %s is %s, want %s", revision, got, want)
		}
	}
	moed.Status.Serving = nil // as an operator of an earlier release reports it
	if got := (Objects{Deployment: moed}).stage("new", &metav1.ObjectMeta{}); got != stageInService {
		t.Errorf("without status.serving the revision is %s", got)
	}
}
