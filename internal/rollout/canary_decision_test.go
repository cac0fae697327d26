// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"testing"
	"time"
)

func TestJudge(t *testing.T) {
	ready := func(ago time.Duration) Replica {
		return Replica{Name: "0", Ready: true, Since: start.Add(-ago)}
	}
	unready := func(ago time.Duration, restarts int32) Replica {
		return Replica{Name: "1", Since: start.Add(-ago), Restarts: restarts}
	}
	queued := func(ago time.Duration) Replica {
		return Replica{Name: "1", Since: start.Add(-ago), Queued: true}
	}
	cases := map[string]struct {
		trial  Trial
		step   Step
		reason string
		again  time.Duration
	}{
		"no replica yet":              {Trial{Canary: 1}, StepCanary, "CanaryStarting", 0},
		"starting":                    {Trial{Canary: 1, Replicas: []Replica{unready(time.Minute, 0)}}, StepCanary, "CanaryStarting", 59 * time.Minute},
		"restarted rarely":            {Trial{Canary: 1, Replicas: []Replica{unready(10*time.Minute, 2)}}, StepCanary, "CanaryStarting", 50 * time.Minute},
		"crashing, for a moment":      {Trial{Canary: 1, Replicas: []Replica{unready(4*time.Minute, 5)}}, StepCanary, "CanaryStarting", time.Minute},
		"crashing":                    {Trial{Canary: 1, Replicas: []Replica{unready(5*time.Minute, 3)}}, StepRollBack, "CanaryCrashing", 0},
		"never ready":                 {Trial{Canary: 1, Replicas: []Replica{unready(time.Hour, 0)}}, StepRollBack, "CanaryNotReady", 0},
		"queued for a day":            {Trial{Canary: 1, Replicas: []Replica{queued(24 * time.Hour)}}, StepCanary, "CanaryStarting", 0},
		"promoted, and one is queued": {Trial{Canary: 1, Promoting: true, Replicas: []Replica{ready(time.Minute), queued(24 * time.Hour)}}, StepPromote, "Promoting", 0},
		"one of two":                  {Trial{Canary: 2, Replicas: []Replica{ready(time.Hour), unready(time.Minute, 0)}}, StepCanary, "CanaryStarting", 59 * time.Minute},
		"soaking":                     {Trial{Canary: 1, Soak: 5 * time.Minute, Measured: true, Replicas: []Replica{ready(time.Minute)}, Comparison: Comparison{Verdict: Better}}, StepCanary, "Canary", 30 * time.Second},
		"nearly soaked":               {Trial{Canary: 1, Soak: 5 * time.Minute, Measured: true, Replicas: []Replica{ready(295 * time.Second)}, Comparison: Comparison{Verdict: Better}}, StepCanary, "Canary", 5 * time.Second},
		"clock set back":              {Trial{Canary: 1, Soak: 5 * time.Minute, Measured: true, Replicas: []Replica{ready(-time.Hour)}, Comparison: Comparison{Verdict: Better}}, StepCanary, "Canary", 30 * time.Second},
		"clock set back, no soak":     {Trial{Canary: 1, Replicas: []Replica{ready(-time.Second)}}, StepPromote, "Ready", 0},
		"clock set back, starting":    {Trial{Canary: 1, Replicas: []Replica{unready(-6*time.Hour, 0)}}, StepCanary, "CanaryStarting", time.Hour},
		"soaked, and better":          {Trial{Canary: 1, Soak: 5 * time.Minute, Measured: true, Replicas: []Replica{ready(5 * time.Minute)}, Comparison: Comparison{Verdict: Better, Message: "higher"}}, StepPromote, "Better", 0},
		"soaked since the second":     {Trial{Canary: 2, Soak: 5 * time.Minute, Measured: true, Replicas: []Replica{ready(time.Hour), ready(time.Minute)}, Comparison: Comparison{Verdict: Better}}, StepCanary, "Canary", 30 * time.Second},
		"worse, while it soaks":       {Trial{Canary: 1, Soak: 5 * time.Minute, Measured: true, Replicas: []Replica{ready(time.Minute)}, Comparison: Comparison{Verdict: Worse, Reason: "MoreFailures"}}, StepRollBack, "MoreFailures", 0},
		"worse, though approved":      {Trial{Canary: 1, Soak: time.Second, Approved: true, Measured: true, Replicas: []Replica{ready(time.Minute)}, Comparison: Comparison{Verdict: Worse, Reason: "MoreFailures"}}, StepRollBack, "MoreFailures", 0},
		"worse, during the promotion": {Trial{Canary: 1, Soak: time.Second, Promoting: true, Measured: true, Replicas: []Replica{ready(time.Minute)}, Comparison: Comparison{Verdict: Worse, Reason: "MoreFailures"}}, StepRollBack, "MoreFailures", 0},
		"promoted, and unclear":       {Trial{Canary: 1, Soak: 10 * time.Second, Promoting: true, Measured: true, Replicas: []Replica{ready(time.Minute)}, Comparison: Comparison{Verdict: TooFew}}, StepPromote, "Promoting", time.Second},
		"promoted, and one starts":    {Trial{Canary: 1, Soak: 10 * time.Second, Promoting: true, Measured: true, Replicas: []Replica{ready(time.Minute), unready(time.Minute, 0)}}, StepPromote, "Promoting", time.Second},
		"promoted, and one crashes":   {Trial{Canary: 1, Soak: 5 * time.Minute, Promoting: true, Measured: true, Replicas: []Replica{ready(time.Minute), unready(4*time.Minute+50*time.Second, 3)}}, StepPromote, "Promoting", 10 * time.Second},
		"promoted without a soak":     {Trial{Canary: 1, Promoting: true, Replicas: []Replica{ready(time.Minute), unready(time.Minute, 0)}}, StepPromote, "Promoting", 59 * time.Minute},
		"not better, so far":          {Trial{Canary: 1, Soak: time.Minute, Measured: true, Replicas: []Replica{ready(30 * time.Minute)}, Comparison: Comparison{Verdict: NotBetter}}, StepCanary, "Canary", 6 * time.Second},
		"not better, approved":        {Trial{Canary: 1, Soak: time.Minute, Approved: true, Measured: true, Replicas: []Replica{ready(30 * time.Minute)}, Comparison: Comparison{Verdict: NotBetter}}, StepCanary, "Canary", 6 * time.Second},
		"not better, for an hour":     {Trial{Canary: 1, Soak: time.Minute, Measured: true, Replicas: []Replica{ready(time.Hour)}, Comparison: Comparison{Verdict: NotBetter}}, StepRollBack, "NoGainObserved", 0},
		"few requests, so far":        {Trial{Canary: 1, Soak: time.Minute, Measured: true, Replicas: []Replica{ready(30 * time.Minute)}, Comparison: Comparison{Verdict: TooFew}}, StepCanary, "Canary", 6 * time.Second},
		"few requests, for an hour":   {Trial{Canary: 1, Soak: time.Minute, Measured: true, Replicas: []Replica{ready(time.Hour)}, Comparison: Comparison{Verdict: TooFew}}, StepCanary, "CanaryInconclusive", 30 * time.Second},
		"few requests, a long soak":   {Trial{Canary: 1, Soak: time.Hour, Measured: true, Replicas: []Replica{ready(11 * time.Hour)}, Comparison: Comparison{Verdict: TooFew}}, StepCanary, "Canary", 30 * time.Second},
		"nothing is measured":         {Trial{Canary: 1, Soak: time.Minute, Replicas: []Replica{ready(2 * time.Minute)}, Comparison: Comparison{Verdict: TooFew}}, StepCanary, "CanaryInconclusive", 30 * time.Second},
		"nothing, and it still soaks": {Trial{Canary: 1, Soak: time.Minute, Approved: true, Replicas: []Replica{ready(30 * time.Second)}, Comparison: Comparison{Verdict: TooFew}}, StepCanary, "Canary", 6 * time.Second},
		"nothing, approved":           {Trial{Canary: 1, Soak: time.Minute, Approved: true, Replicas: []Replica{ready(2 * time.Minute)}, Comparison: Comparison{Verdict: TooFew}}, StepPromote, "Approved", 0},
		"no soak":                     {Trial{Canary: 1, Measured: true, Replicas: []Replica{ready(0)}, Comparison: Comparison{Verdict: Worse, Reason: "MoreFailures"}}, StepPromote, "Ready", 0},
		"no soak, not ready":          {Trial{Canary: 1, Measured: true, Replicas: []Replica{unready(0, 0)}}, StepCanary, "CanaryStarting", time.Hour},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			tc.trial.Now = start
			if got := Judge(tc.trial); got.Step != tc.step || got.Reason != tc.reason || got.Again != tc.again || got.Message == "" && got.Step != StepRollBack {
				t.Errorf("%+v, want %s %s, again in %s", got, tc.step, tc.reason, tc.again)
			}
		})
	}
}
