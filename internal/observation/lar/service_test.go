// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// ended returns a request as seen by a router, with times in 64ths of a second (their sums are exact in any order).
func ended(random *rand.Rand) Service {
	seconds := func() float64 { return float64(random.IntN(640)) / 64 }
	s := Service{Requests: 1}
	switch random.IntN(4) {
	case 0:
		s.Failures = 1
	case 1:
		s.Answer.AddWith(seconds(), Covariates{float64(random.IntN(100)), 7, float64(random.IntN(9))})
	default:
		s.FirstToken.AddWith(seconds(), Covariates{float64(random.IntN(100)), 7, float64(random.IntN(9))})
		s.InterToken.Add(seconds())
	}
	return s
}

// For any distribution of requests over routers, the sum over their reports since a time equals the requests that ended
// in the minutes since.
func TestServiceSince(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var routers [3]ServiceWindow
	begin := start.Truncate(time.Minute)
	now := begin.Add(90 * time.Minute)
	since := begin.Add(50*time.Minute + time.Second)
	want, all := map[string]Service{}, map[string]Service{}
	add := func(sums map[string]Service, revision string, s Service) {
		sum := sums[revision]
		sum.Merge(s)
		sums[revision] = sum
	}
	for at := begin; !at.After(now); at = at.Add(7 * time.Second) {
		revision, s := fmt.Sprint("r", random.IntN(3)), ended(random)
		routers[random.IntN(3)].Add(at, revision, s)
		if !at.Before(since.Truncate(time.Minute).Add(time.Minute)) {
			add(want, revision, s)
		}
		if !at.Before(now.Add(-59 * time.Minute)) {
			add(all, revision, s)
		}
	}
	got, gotAll := map[string]Service{}, map[string]Service{}
	for i := range routers {
		report := Report{Service: routers[i].Recent(now)}
		text, err := json.Marshal(report)
		if err != nil {
			t.Fatal(err)
		}
		var back Report
		if err := json.Unmarshal(text, &back); err != nil {
			t.Fatal(err)
		}
		if err := back.Validate(); err != nil || len(back.Service) > ServiceBuckets {
			t.Errorf("%d buckets, error %v", len(back.Service), err)
		}
		for _, revision := range []string{"r0", "r1", "r2"} {
			for minute, s := range back.ServiceSince(revision, since) {
				if minute.Before(since) || minute != minute.Truncate(time.Minute) {
					t.Errorf("minute %v since %v", minute, since)
				}
				add(got, revision, s)
			}
			for _, s := range back.ServiceSince(revision, time.Time{}) {
				add(gotAll, revision, s)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("since a time (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(all, gotAll); diff != "" {
		t.Errorf("the last hour (-want +got):\n%s", diff)
	}
}

func TestServiceWindow(t *testing.T) {
	one := Service{Requests: 1}
	var w ServiceWindow
	w.Add(start, "r", one)
	recent := w.Recent(start)
	w.Add(start, "r", one)
	if got := recent[0].Revisions["r"].Requests; got != 1 {
		t.Errorf("a report of one request grew to %d", got)
	}
	// Setting the clock back loses no request.
	w.Add(start.Add(-time.Hour), "r", one)
	if got := w.Recent(start); len(got) != 1 || got[0].Revisions["r"].Requests != 3 {
		t.Errorf("%+v", got)
	}
	if later := w.Recent(start.Add(time.Hour)); len(later) != 0 {
		t.Errorf("after an hour without a request %d buckets are left", len(later))
	}
	for i := range 3 * maxServed {
		w.Add(start.Add(time.Hour), fmt.Sprint("r", i), one)
		w.Add(start.Add(time.Hour), "r0", one)
	}
	got := w.Recent(start.Add(time.Hour))[0].Revisions
	if len(got) != maxServed || got["r0"].Requests != 3*maxServed+1 {
		t.Errorf("%d revisions are kept, %d requests of the first", len(got), got["r0"].Requests)
	}
}

func TestRejectsInvalidReports(t *testing.T) {
	with := func(value float64, x Covariates) (m Moments) {
		m.AddWith(value, x)
		return m
	}
	changed := func(change func(*CovariateSums)) Moments {
		m := with(2, Covariates{3, 4, 5})
		change(&m.Covariates)
		return m
	}
	served := func(s Service) Report {
		return Report{Service: []ServiceBucket{{Start: start, Revisions: map[string]Service{"r": s}}}}
	}
	forecast := func(f Forecast) Report { return Report{Observations: []Observation{{}, {Forecast: &f}}} }
	many := map[string]Service{}
	for i := range maxServed + 1 {
		many[fmt.Sprint(i)] = Service{}
	}
	for name, tc := range map[string]struct {
		report Report
		says   string // empty if valid
	}{
		"service":             {served(Service{Requests: 2, Failures: 1, FirstToken: Moments{N: 1, Sum: 2, SumSquares: 4}}), ""},
		"forecast":            {forecast(Forecast{Best: 3, Highest: 0.5, Predicted: 0.25, Known: 1}), ""},
		"more failures":       {served(Service{Requests: 1, Failures: 2}), `service[0].revisions["r"].failures are 2 of 1 requests`},
		"negative failures":   {served(Service{Requests: 1, Failures: -1}), "failures are -1"},
		"more times":          {served(Service{Requests: 1, Answer: Moments{N: 2, Sum: 1, SumSquares: 1}}), "answer.n is 2 of 1 requests"},
		"time of none":        {served(Service{Requests: 1, InterToken: Moments{Sum: 1, SumSquares: 1}}), "interToken: n is 0"},
		"negative time":       {served(Service{Requests: 1, FirstToken: Moments{N: 1, Sum: -1, SumSquares: 1}}), "firstToken: sum is -1"},
		"covariates":          {served(Service{Requests: 1, Answer: with(2, Covariates{3, 4, 5})}), ""},
		"more covariates":     {served(Service{Requests: 1, Answer: changed(func(c *CovariateSums) { c.N = 2 })}), "answer: covariates.n is 2 of 1 requests"},
		"negative covariate":  {served(Service{Requests: 1, Answer: changed(func(c *CovariateSums) { c.X[0] = -3 })}), "answer: covariates.x is -3"},
		"covariate of NaN":    {served(Service{Requests: 1, Answer: changed(func(c *CovariateSums) { c.XX[1] = math.NaN() })}), "answer: covariates.xx is NaN"},
		"a sum too large":     {served(Service{Requests: 1, Answer: changed(func(c *CovariateSums) { c.X[1] = 5 })}), "answer: covariates.x[1] is 5"},
		"a product too large": {served(Service{Requests: 1, Answer: changed(func(c *CovariateSums) { c.XY[2] = 11 })}), "xy[2] 11"},
		"products too large":  {served(Service{Requests: 1, Answer: changed(func(c *CovariateSums) { c.XX[1] = 13 })}), "xx has 13 for x[0] and x[1]"},
		"too many revisions": {Report{Service: []ServiceBucket{{Start: start, Revisions: many}}},
			fmt.Sprintf("service[0].%d revisions: at most %d", maxServed+1, maxServed)},
		"too many buckets":  {Report{Service: make([]ServiceBucket, 2*ServiceBuckets+1)}, "service: 121 buckets: at most 120"},
		"negative rank":     {forecast(Forecast{Best: -1}), "observations[1].forecast.best is -1"},
		"negative share":    {forecast(Forecast{Predicted: -0.5}), "observations[1].forecast.predicted is -0.5"},
		"share that is NaN": {forecast(Forecast{Known: math.NaN()}), "observations[1].forecast.known is NaN"},
	} {
		err := tc.report.Validate()
		if tc.says == "" && err != nil || tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)) {
			t.Errorf("%s: error %v, want one that says %q", name, err, tc.says)
		}
	}
}

// A report of a router without covariates has none, and a manager without covariates ignores them.
func TestCovariatesOfOlderRouters(t *testing.T) {
	var old Moments
	if err := json.Unmarshal([]byte(`{"n":1,"sum":2,"sumSquares":4}`), &old); err != nil || old.Validate() != nil || old.Covariates != (CovariateSums{}) {
		t.Errorf("%+v, error %v", old, err)
	}
	text, err := json.Marshal(old)
	if err != nil || strings.Contains(string(text), "covariates") {
		t.Errorf("%s, error %v", text, err)
	}
	old.AddWith(3, Covariates{1, 2, 3e9})
	if old.N != 2 || old.Covariates.N != 1 || old.Covariates.X[2] != maxCovariate || old.Covariates.Product(2, 1) != 2*maxCovariate {
		t.Errorf("%+v", old)
	}
}
