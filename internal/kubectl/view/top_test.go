package view

import (
	"testing"

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
