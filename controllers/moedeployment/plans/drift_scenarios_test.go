// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"cmp"
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// story is a MoEDeployment in a cluster. The planner runs repeatedly, while the test profiles, solves and changes
// objects.
type story struct {
	*shell
	t         *testing.T
	moed      *semmoev1.MoEDeployment
	workloads []*revisions.Workload
	now       time.Time
	// writes counts the objects that the planner creates, annotates and deletes.
	writes int
}

func newStory(t *testing.T, change ...func(*semmoev1.MoEDeployment)) *story {
	t.Helper()
	profiled := func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{
			Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, SamplingSpec: semmoev1.SamplingSpec{Requests: 100, Tokens: 10000, RequestTokens: 512},
			Target: semmoev1.ProfilingTargetServing, Refresh: semmoev1.RefreshLive, LiveSamples: semmoev1.LiveSamplesSequences,
		}
		m.Spec.Rollout.MinimumGainPercent = ptr.To[int32](2)
	}
	s := &story{t: t, moed: moedtest.Deployment(append([]func(*semmoev1.MoEDeployment){profiled}, change...)...), now: moedtest.Start}
	s.shell = shellOn(t, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			s.writes++
			object.SetCreationTimestamp(metav1.NewTime(s.now))
			return c.Create(ctx, object, options...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			s.writes++
			return c.Patch(ctx, object, patch, options...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.DeleteOption) error {
			s.writes++
			return c.Delete(ctx, object, options...)
		},
	}, s.moed, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: revisions.AnswersName(s.moed, moedtest.Model), Labels: desired.Labels(s.moed, semmoev1.ComponentAnswers),
	}})
	s.Now = func() time.Time { return s.now }
	return s
}

// reconcile runs the planner once.
func (s *story) reconcile(drifted bool) planner.Planning {
	s.t.Helper()
	p, err := s.Plan(context.Background(), s.moed, moedtest.Report(), s.workloads, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.Replan(context.Background(), p, planner.DriftSignal{Drifted: drifted, Now: s.now}); err != nil {
		s.t.Fatal(err)
	}
	return p
}

func (s *story) profiles() []semmoev1.AffinityProfile {
	s.t.Helper()
	var list semmoev1.AffinityProfileList
	if err := s.List(context.Background(), &list); err != nil {
		s.t.Fatal(err)
	}
	return list.Items
}

func (s *story) plans() []semmoev1.PlacementPlan {
	s.t.Helper()
	var list semmoev1.PlacementPlanList
	if err := s.List(context.Background(), &list); err != nil {
		s.t.Fatal(err)
	}
	return list.Items
}

// profile completes the only incomplete profile.
func (s *story) profile(result string) *semmoev1.AffinityProfile {
	s.t.Helper()
	left := slices.DeleteFunc(s.profiles(), func(p semmoev1.AffinityProfile) bool { return p.Status.Result != nil })
	if len(left) != 1 {
		s.t.Fatalf("%d profiles are not complete, want one", len(left))
	}
	left[0].Status = moedtest.ProfiledBy("", result, s.now).Status
	s.update(&left[0])
	return &left[0]
}

// solve publishes the only unsolved plan.
func (s *story) solve(digest string, tier semmoev1.Tier, verdict semmoev1.Verdict) *semmoev1.PlacementPlan {
	s.t.Helper()
	left := slices.DeleteFunc(s.plans(), func(p semmoev1.PlacementPlan) bool { return p.Status.PlanDigest != "" })
	if len(left) != 1 {
		s.t.Fatalf("%d plans are not solved, want one", len(left))
	}
	left[0].Status = moedtest.PlanOf(left[0].Name, digest, nil).Status
	left[0].Status.Tier, left[0].Status.Verdict = tier, verdict
	s.update(&left[0])
	return &left[0]
}

func (s *story) update(object client.Object) {
	s.t.Helper()
	if err := s.Update(context.Background(), object); err != nil {
		s.t.Fatal(err)
	}
}

// inService brings the plan of the spec into service.
func (s *story) inService() *semmoev1.PlacementPlan {
	s.t.Helper()
	s.reconcile(false)
	s.profile("r0")
	s.reconcile(false)
	base := s.solve("b0", "", semmoev1.VerdictGain)
	s.workloads = []*revisions.Workload{workloadUnder(s.t, base, 2)}
	return base
}

// drift simulates a drift that results in a plan of a tier.
func (s *story) drift(digest string, tier semmoev1.Tier) *semmoev1.PlacementPlan {
	s.t.Helper()
	s.reconcile(true)
	s.profile("of-" + digest)
	s.reconcile(true)
	plan := s.solve(digest, tier, semmoev1.VerdictGain)
	s.reconcile(false)
	return plan
}

// checkTables runs the planner, and checks the tables used with the serving layout.
func (s *story) checkTables(when, want string) planner.Planning {
	s.t.Helper()
	p := s.reconcile(false)
	if got := nameOf(p.Tables); got != want {
		s.t.Errorf("%s: the tables in use are those of %q, want %q", when, got, want)
	}
	return p
}

// A plan made for drift that a user deletes is not recreated from its profile, whether the profile still exists or not.
// Continuing drift results in another profile.
func TestDeletedReplan(t *testing.T) {
	for name, tc := range map[string]struct {
		tier     semmoev1.Tier
		after    time.Duration
		profiles int
	}{
		"young tables":  {semmoev1.TierTables, time.Hour, 2},
		"old tables":    {semmoev1.TierTables, 48 * time.Hour, 1},
		"young layout":  {semmoev1.TierLayout, time.Hour, 2},
		"an old layout": {semmoev1.TierLayout, 48 * time.Hour, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory(t)
			base := s.inService()
			plan := s.drift("t1", tc.tier)
			s.now = s.now.Add(tc.after)
			writes := s.writes
			if s.reconcile(false); s.writes != writes || len(s.profiles()) != 2 || len(s.plans()) != 2 {
				t.Fatalf("%d writes while nothing happens; %d profiles and %d plans", s.writes-writes, len(s.profiles()), len(s.plans()))
			}
			if err := s.shell.Client.Delete(context.Background(), plan); err != nil {
				t.Fatal(err)
			}
			s.checkTables("the plan is deleted", "")
			writes = s.writes
			for range 2 {
				if p := s.reconcile(false); p.Plan.Name != base.Name || p.Candidate != nil {
					t.Errorf("wanted is %s, candidate %+v; want the plan before", p.Plan.Name, p.Candidate)
				}
			}
			if s.writes != writes || len(s.plans()) != 1 || len(s.profiles()) != tc.profiles {
				t.Errorf("left are %d plans and %d profiles after %d more writes, want 1 and %d after none", len(s.plans()), len(s.profiles()), s.writes-writes, tc.profiles)
			}
			s.reconcile(true)
			if made := s.profile("r2"); made.Annotations[semmoev1.AnnotationPlanned] != "" || len(s.profiles()) != tc.profiles+1 {
				t.Errorf("further drift results in profile %s with annotations %v", made.Name, made.Annotations)
			}
		})
	}
}

// A plan that is deleted before its profile records it was never observed, and is recreated under the same name.
func TestUnobservedReplan(t *testing.T) {
	s := newStory(t)
	s.inService()
	s.reconcile(true)
	s.profile("r1")
	s.reconcile(false)
	made := s.plans()
	for i := range made {
		if made[i].Spec.Current == nil {
			continue
		}
		if err := s.shell.Client.Delete(context.Background(), &made[i]); err != nil {
			t.Fatal(err)
		}
	}
	if s.reconcile(false); !slices.EqualFunc(s.plans(), made, func(a, b semmoev1.PlacementPlan) bool { return a.Name == b.Name }) || len(made) != 2 {
		t.Errorf("there are %d plans, want the %d of before", len(s.plans()), len(made))
	}
}

// If the spec no longer lets routers store prompts, a running live profile is replaced by a profile of counts, but not
// for an outdated spec.
func TestReplanFollowsTheSpec(t *testing.T) {
	s := newStory(t)
	s.inService()
	s.reconcile(true)
	samples := func() semmoev1.LiveSamples {
		t.Helper()
		made := slices.DeleteFunc(s.profiles(), func(p semmoev1.AffinityProfile) bool { return p.Spec.Live == nil })
		if len(made) != 1 {
			t.Fatalf("%d live profiles, want one", len(made))
		}
		return made[0].Spec.Live.Samples
	}
	s.moed.Spec.Profiling.LiveSamples, s.moed.Generation = semmoev1.LiveSamplesCounts, 0
	for range 2 {
		if s.reconcile(true); samples() != semmoev1.LiveSamplesSequences {
			t.Error("a profile is given up by an old spec")
		}
	}
	s.moed.Generation = 1
	for range 2 {
		s.reconcile(true)
	}
	if got := samples(); got != semmoev1.LiveSamplesCounts {
		t.Errorf("the profile is made of %s, want counts", got)
	}
}

// No plan is made from a profile that is being deleted: it would wait permanently.
func TestNoReplanOfADeletedProfile(t *testing.T) {
	s := newStory(t)
	s.inService()
	s.reconcile(true)
	s.profile("r1")
	s.now = s.now.Add(48 * time.Hour)
	if s.reconcile(false); len(s.plans()) != 1 || len(s.profiles()) != 1 {
		t.Errorf("%d plans and %d profiles, want only those of the spec", len(s.plans()), len(s.profiles()))
	}
}

// The tables in use stay with the serving layout while another layout is desired and does not serve yet, regardless
// of the result.
func TestTablesStayWithWhatServes(t *testing.T) {
	s := newStory(t)
	s.inService()
	tables := s.drift("t1", semmoev1.TierTables)
	pin := func(name string) { s.moed.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: name} }

	pin("missing")
	if p := s.checkTables("a plan is pinned that is not there", tables.Name); p.Pin.Reason != "PlanNotFound" {
		t.Errorf("the pin's fault is %+v", p.Pin)
	}
	chosen := moedtest.PlanOf("missing", "x0", unsolved)
	if err := s.shell.Client.Create(context.Background(), chosen); err != nil {
		t.Fatal(err)
	}
	s.checkTables("it is being solved", tables.Name)
	s.solve("x0", "", semmoev1.VerdictGain)
	if p := s.checkTables("it is on its canary", tables.Name); p.Candidate == nil || p.Candidate.Digest != "x0-full" {
		t.Errorf("the candidate is %+v, want the plan that is pinned", p.Candidate)
	}

	s.moed.Spec.Placement.PlanRef = nil
	s.moed.Spec.Placement.Solver.Seed = ptr.To[int64](2)
	s.checkTables("another plan is asked for", tables.Name)
	s.checkTables("it is being solved", tables.Name)
	s.solve("b1", "", semmoev1.VerdictNoGainExpected)
	s.checkTables("it gains nothing", tables.Name)

	if err := s.shell.Client.Delete(context.Background(), tables); err != nil {
		t.Fatal(err)
	}
	s.checkTables("the plan with the tables is deleted", "")
}

// Tables of a plan of another owner also stay when another plan is pinned.
func TestPinnedTablesOfOthersStay(t *testing.T) {
	s := newStory(t)
	s.inService()
	tables := replanOf("theirs", "t1", "b0", semmoev1.TierTables, moedtest.Start)
	if err := s.shell.Client.Create(context.Background(), tables); err != nil {
		t.Fatal(err)
	}
	s.moed.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "theirs"}
	s.checkTables("pinned", "theirs")
	s.moed.Spec.Placement.PlanRef.Name = "missing"
	s.checkTables("another is pinned", "theirs")
	s.moed.Spec.Placement.PlanRef = nil
	s.checkTables("none is pinned", "")
}

// New tables are used with their layout even if another owner created both plans: no pod restarts. The serving state
// stays: of two plans with one digest the mounted one is used, and pods that serve the tables' own plan keep its files.
func TestPinnedTablesOfALayoutOfOthers(t *testing.T) {
	layout := func(name string, change func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
		return moedtest.PlanOf(name, "x0", change)
	}
	pin := replanOf("theirs", "t1", "x0", semmoev1.TierTables, moedtest.Start)
	for name, tc := range map[string]struct {
		there []*semmoev1.PlacementPlan
		// under is the plan that serves; nil for the plan of the spec.
		under               *semmoev1.PlacementPlan
		plan, tables, tried string
	}{
		"their layout serves":                    {there: []*semmoev1.PlacementPlan{layout("x", nil)}, under: layout("x", nil), plan: "x", tables: "theirs"},
		"another plan of the same digest serves": {there: []*semmoev1.PlacementPlan{layout("w", nil), layout("x", nil), layout("y", nil)}, under: layout("x", nil), plan: "x", tables: "theirs"},
		"the pinned plan serves":                 {there: []*semmoev1.PlacementPlan{layout("x", nil)}, under: pin, plan: "theirs"},
		"another layout serves":                  {there: []*semmoev1.PlacementPlan{layout("x", nil)}, plan: "x", tried: "x-x0"},
		"there is no such layout":                {plan: "theirs", tried: "theirs-t1"},
		"the layout is not published":            {there: []*semmoev1.PlacementPlan{layout("x", func(p *semmoev1.PlacementPlan) { p.Status.Conditions = nil })}, plan: "theirs", tried: "theirs-t1"},
		"the layout has other ranks":             {there: []*semmoev1.PlacementPlan{layout("x", func(p *semmoev1.PlacementPlan) { p.Spec.ExpertParallelSize = 8 })}, plan: "theirs", tried: "theirs-t1"},
		"the layout has other tokens":            {there: []*semmoev1.PlacementPlan{layout("x", func(p *semmoev1.PlacementPlan) { p.Spec.TokenShuffle = semmoev1.TokenShuffleDisabled })}, plan: "theirs", tried: "theirs-t1"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory(t)
			under := cmp.Or(tc.under, s.inService())
			for _, plan := range append(tc.there, pin.DeepCopy()) {
				if err := s.shell.Client.Create(context.Background(), plan); err != nil {
					t.Fatal(err)
				}
			}
			s.workloads = []*revisions.Workload{workloadUnder(t, under, 2)}
			s.moed.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: pin.Name}
			p := s.checkTables("pinned", tc.tables)
			if p.Plan.Name != tc.plan || !p.PlanPinned(s.moed) {
				t.Errorf("the layout is that of plan %s, want %s", p.Plan.Name, tc.plan)
			}
			if p.Serving == nil || p.Serving.ConfigMap != under.Status.ConfigMap {
				t.Errorf("serving is %+v, want ConfigMap %s as before", p.Serving, under.Status.ConfigMap)
			}
			if tried := p.Candidate; (tried == nil) != (tc.tried == "") || tried != nil && tried.ConfigMap != tc.tried {
				t.Errorf("the candidate is %+v, want ConfigMap %q", tried, tc.tried)
			}
		})
	}
}

// Pinning new tables approves the layout that they are for.
func TestPinnedTablesApproveTheirLayout(t *testing.T) {
	for name, change := range map[string]func(*semmoev1.MoEDeployment){
		"AwaitingApproval":         func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = semmoev1.ApprovalManual },
		"RolloutInterruptsService": func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) },
		"NoRouter":                 func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone },
	} {
		s := newStory(t, change)
		s.inService()
		s.workloads = []*revisions.Workload{workloadUnder(t, nil, 1)}
		if p := s.reconcile(false); p.Candidate != nil || p.Hold.Reason != name {
			t.Errorf("the candidate is %+v before anything is pinned, held because of %q; want %s", p.Candidate, p.Hold.Reason, name)
		}
		if err := s.shell.Client.Create(context.Background(), replanOf("t1", "t1", "b0", semmoev1.TierTables, moedtest.Start)); err != nil {
			t.Fatal(err)
		}
		s.moed.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "t1"}
		if p := s.reconcile(false); p.Candidate == nil || p.Candidate.Digest != "b0-full" || p.Hold.Reason != "" || !p.PlanPinned(s.moed) {
			t.Errorf("%s: the candidate is %+v, held because of %+v; want the layout of the pinned plan", name, p.Candidate, p.Hold)
		}
	}
}

// An approved plan stays on its canary when a newer plan that waits for approval appears.
func TestApprovedPlanKeepsItsCanary(t *testing.T) {
	s := newStory(t, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Approval = semmoev1.ApprovalManual })
	s.inService()
	s.drift("l1", semmoev1.TierLayout)
	s.now = s.now.Add(time.Hour)
	s.reconcile(true)
	s.profile("of-l2")
	s.moed.Annotations = map[string]string{semmoev1.AnnotationApprove: "l1"}
	if p := s.reconcile(true); p.Candidate == nil || p.Candidate.Digest != "l1-full" {
		t.Fatalf("the candidate is %+v, want the plan that was approved", p.Candidate)
	}
	newer := s.solve("l2", semmoev1.TierLayout, semmoev1.VerdictGain)
	if p := s.reconcile(false); p.Candidate == nil || p.Candidate.Digest != "l1-full" {
		t.Errorf("with a newer plan the candidate is %+v (%+v), want the approved one", p.Candidate, p.Hold)
	}
	s.workloads = []*revisions.Workload{workloadUnder(t, planner.PlanWithDigest("l1-full", s.reconcile(false).Plans), 2)}
	if p := s.reconcile(false); p.Plan.Name != newer.Name || p.Hold.Reason != "AwaitingApproval" {
		t.Errorf("once it serves, the wanted plan is %s, held because of %q; want the newer one, waiting for approval", p.Plan.Name, p.Hold.Reason)
	}
}
