package moedeployment

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// tokenPlan is one for tokens that stay where they are.
func tokenPlan(name, digest string) *semmoev1.PlacementPlan {
	return moedtest.PlanOf(name, digest, func(p *semmoev1.PlacementPlan) {
		p.Spec.Attention, p.Spec.TokenShuffle = semmoev1.AttentionTensorParallel, semmoev1.TokenShuffleDisabled
		p.Status.Forecast = &semmoev1.PlanForecast{LARMilli: 250, BaselineMilli: 250, LARSummary: "25.0%", BaselineSummary: "25.0%", RemoteRanksMilli: 1800, BaselineRemoteRanksMilli: 2300}
	})
}

// A plan of tokens that stay where attention leaves them is made for few messages; one of tokens that are shuffled has the name that it
// always had, or an upgrade would cost a solve of each.
func TestPlansAreToldOfTokens(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{Result: &semmoev1.ProfileResult{Digest: "d"}}}
	profile.Name = "p"
	of := func(change ...func(*semmoev1.MoEDeployment)) *semmoev1.PlacementPlan {
		return planFor(moedtest.Deployment(change...), profile, semmoev1.RealizationEngineMap)
	}
	plain, stay, move := of(), of(moedtest.Tokens), of(moedtest.Shuffled)
	if plain.Spec.TokenShuffle != "" || stay.Spec.TokenShuffle != semmoev1.TokenShuffleDisabled || move.Spec.TokenShuffle != "" {
		t.Errorf("plans are told %q, %q and %q", plain.Spec.TokenShuffle, stay.Spec.TokenShuffle, move.Spec.TokenShuffle)
	}
	if plain.Name != "m-b9e28e5c" || stay.Name == move.Name {
		t.Errorf("their names are %s, %s and %s", plain.Name, stay.Name, move.Name)
	}
	for name, tc := range map[string]struct {
		Change func(*semmoev1.MoEDeployment)
		plan   *semmoev1.PlacementPlan
		fits   bool
	}{
		"tokens that stay":               {moedtest.Tokens, stay, true},
		"a plan for tokens that move":    {moedtest.Tokens, move, false},
		"tokens that move":               {moedtest.Shuffled, move, true},
		"a plan for tokens that stay":    {moedtest.Shuffled, stay, false},
		"requests, a plan for requests":  {nil, plain, true},
		"requests, one of tokens":        {nil, move, false},
		"requests, one of staying ones":  {nil, stay, false},
		"tokens, and a plan of requests": {moedtest.Shuffled, plain, false},
	} {
		moed := moedtest.Deployment()
		if tc.Change != nil {
			tc.Change(moed)
		}
		if err := CheckPin(moed, tc.plan); (err == nil) != tc.fits {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A plan for tokens is rolled out where there is an all-to-all, keeps serving, and goes where it does not fit any more.
func TestChooseLayoutForTokens(t *testing.T) {
	old, fresh := tokenPlan("old", "aa"), tokenPlan("new", "bb")
	under := func(plan *semmoev1.PlacementPlan, change func(*semmoev1.MoEDeployment)) []*revisions.Workload {
		made, err := revisions.Render(moedtest.Deployment(change), "r1", moedtest.Report(), revisions.LayoutOf(plan, semmoev1.RealizationEngineMap), revisions.Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		*made.Replicas() = 2
		return []*revisions.Workload{made}
	}
	of := func(plan *semmoev1.PlacementPlan) *revisions.Layout {
		return revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	}
	for name, tc := range map[string]struct {
		Change    func(*semmoev1.MoEDeployment)
		workloads []*revisions.Workload
		want, try *revisions.Layout
		hold      string
		says      string
	}{
		"the first":            {Change: moedtest.Tokens, want: of(fresh)},
		"in service":           {Change: moedtest.Tokens, workloads: under(fresh, moedtest.Tokens), want: of(fresh)},
		"in place of another":  {Change: moedtest.Tokens, workloads: under(old, moedtest.Tokens), want: of(old), try: of(fresh)},
		"no router, no matter": {Change: func(m *semmoev1.MoEDeployment) { moedtest.Tokens(m); m.Spec.Routing.Mode = semmoev1.RoutingModeNone }, want: of(fresh)},
		"no all-to-all":        {Change: func(m *semmoev1.MoEDeployment) { moedtest.Tokens(m); m.Spec.Engine.Args = nil }, hold: "NotRealizable", says: "spec.parallelism.attention is TensorParallel"},
		"waits to be approved": {Change: func(m *semmoev1.MoEDeployment) {
			moedtest.Tokens(m)
			m.Spec.Placement.Approval = semmoev1.ApprovalManual
		}, hold: "AwaitingApproval", says: "on 1.80 other ranks, against 2.30 without it"},
		"another size":          {Change: func(m *semmoev1.MoEDeployment) { moedtest.Tokens(m); m.Spec.Parallelism.ExpertParallelSize = 8 }, workloads: under(old, moedtest.Tokens)},
		"attention of requests": {Change: func(*semmoev1.MoEDeployment) {}, workloads: under(old, moedtest.Tokens)},
	} {
		t.Run(name, func(t *testing.T) {
			c := choice{moed: moedtest.Deployment(tc.Change), report: moedtest.Report(), wanted: fresh, workloads: tc.workloads}
			serving, candidate, hold := c.chooseLayout()
			if diff := cmp.Diff([]*revisions.Layout{tc.want, tc.try}, []*revisions.Layout{serving, candidate}); diff != "" || hold.reason != tc.hold || !strings.Contains(hold.message, tc.says) {
				t.Errorf("holds because of %q (%s), want %q; what serves, and what is tried (-want +got):\n%s", hold.reason, hold.message, tc.hold, diff)
			}
		})
	}
}

func TestShuffleIsTold(t *testing.T) {
	fetched := func(message string, code int32) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "fetch-tables", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: message}}}}
		}
	}
	o := observation{Revision: "r", Pods: []*corev1.Pod{
		moedtest.Pod("a", "r", fetched("", 0)), moedtest.Pod("b", "r", fetched("the store is away\n", 0)), moedtest.Pod("c", "r", moedtest.Unready), moedtest.Pod("d", "r", fetched("x", 1)), moedtest.Pod("e", "old", fetched("", 0)),
	}, Workers: []*corev1.Pod{moedtest.Pod("f", "r", fetched("", 0))}}
	const want = ". The tables by which the engine shuffles tokens were given to 2 of 5 pods; pod b: the store is away"
	if got := shuffleText(moedtest.Deployment(moedtest.Shuffled), o); got != want {
		t.Errorf("%q", got)
	}
	if got := shuffleText(moedtest.Deployment(moedtest.Tokens), o); got != "" {
		t.Errorf("of tokens that stay: %q", got)
	}
}

// New tables cannot reach an engine that has read its own.
func TestNewTablesNeedRequestsWithRanks(t *testing.T) {
	tables := moedtest.PlanOf("new", "bb", nil)
	if hold := holdTables(moedtest.Deployment(moedtest.Shuffled), tables); hold.reason != "EngineKeepsTables" {
		t.Errorf("%+v", hold)
	}
	if hold := holdTables(moedtest.Deployment(), tables); hold.reason != "" {
		t.Errorf("of requests: %+v", hold)
	}
}
