// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/trace"
)

// traffic returns two traces of one model with different domains of requests.
func traffic(t *testing.T) (before, after []byte) {
	t.Helper()
	recorded, err := trace.Read(bytes.NewReader(traceFile(t)), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	if recorded.Domains == nil {
		t.Fatal("the trace contains no domains")
	}
	sides := [2][]int{}
	for request, domain := range recorded.Domains {
		side := int(domain) % 2
		sides[side] = append(sides[side], request)
	}
	files := [2][]byte{}
	for side, requests := range sides {
		part := recorded.Subset(requests)
		var file bytes.Buffer
		if err := trace.Write(&file, part); err != nil {
			t.Fatal(err)
		}
		files[side] = file.Bytes()
	}
	return files[0], files[1]
}

// TestReplan checks that a plan that names the plan in service is compared with it on recent requests. The result is
// new tables for its placement or a new placement, and survives the loss of the status.
func TestReplan(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before, after := traffic(t)
	old, recent := w.newProfile("old"), w.newProfile("recent")
	w.complete(old, before)
	// Each token has its own rank, because few kept-out requests would give too few loads to compare.
	perToken := func(p *semmoev1.PlacementPlan) { p.Spec.Attention = semmoev1.AttentionTensorParallel }
	base := w.newPlan("base", "old", perToken)
	base = w.wait(base, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")

	replan := func(name string, change ...func(*semmoev1.PlacementPlanSpec)) *semmoev1.PlacementPlan {
		return w.newPlan(name, "recent", func(p *semmoev1.PlacementPlan) {
			p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: base.Status.PlanDigest}
			p.Spec.PriorProfileRef = &semmoev1.ProfileReference{Name: "old"}
			p.Spec.MinimumGainPercent = ptr.To[int32](0)
			perToken(p)
			for _, c := range change {
				c(&p.Spec)
			}
		})
	}
	next := replan("next", func(s *semmoev1.PlacementPlanSpec) { s.Current.TargetLARMilli = 1 })
	w.wait(next, semmoev1.ConditionReady, metav1.ConditionFalse, "WaitingForProfile", "recent")
	w.complete(recent, after)
	next = w.wait(next, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if next.Status.Tier != semmoev1.TierTables || next.Status.Verdict != semmoev1.VerdictGain {
		t.Fatalf("tier %q, verdict %s, %+v", next.Status.Tier, next.Status.Verdict, next.Status.Comparison)
	}
	c := next.Status.Comparison
	if c == nil || c.CandidateLARMilli <= c.CurrentLARMilli || c.CurrentNanos <= c.CandidateNanos || c.CandidateNanos == 0 || c.MovedExperts != 0 || c.Requests == 0 || c.Reason == "" || c.Hardware != "h200-nvlink" {
		t.Errorf("comparison %+v", c)
	}
	stored, encoded, err := bundle.FetchPlan(t.Context(), w.client, w.namespace, next.Status.PlanDigest)
	if err != nil {
		t.Fatal(err)
	}
	current, currentArtifact, err := bundle.FetchPlan(t.Context(), w.client, w.namespace, base.Status.PlanDigest)
	if err != nil {
		t.Fatal(err)
	}
	if encoded.Manifest.Layout != base.Status.PlanDigest || stored.Layout != base.Status.PlanDigest || !bytes.Equal(encoded.Files[plan.PlacementFile], currentArtifact.Files[plan.PlacementFile]) {
		t.Errorf("the tables are for layout %q, want %s with the same placement", encoded.Manifest.Layout, base.Status.PlanDigest)
	}
	if stored.Schedule == nil || rate(stored.Schedule.LAR) != next.Status.Forecast.LARMilli {
		t.Errorf("the schedule is not for the rate of the plan, %d: %+v", next.Status.Forecast.LARMilli, stored.Schedule)
	}
	for _, p := range []*semmoev1.PlacementPlan{base, next} {
		if rates := p.Status.Forecast.LARByBatch; len(rates) == 0 || rates[0].LARMilli > rates[len(rates)-1].LARMilli {
			t.Errorf("plan %s has the rates %v by batch size", p.Name, rates)
		}
	}
	if diff := cmp.Diff(current.Placement, stored.Placement); diff != "" {
		t.Errorf("the placement has changed (-current +new):\n%s", diff)
	}

	want, times := facts(next), w.stored()
	w.wipe(next)
	next = w.wait(next, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if diff := cmp.Diff(want, facts(next)); diff != "" {
		t.Errorf("restored status (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(times, w.stored()); diff != "" {
		t.Errorf("the plan was solved again (-before +after):\n%s", diff)
	}

	// Tables that replace other tables are for the same layout.
	third := replan("third", func(s *semmoev1.PlacementPlanSpec) {
		s.Current.TablesDigest, s.Current.TargetLARMilli = next.Status.PlanDigest, 1
	})
	third = w.wait(third, semmoev1.ConditionProgressing, metav1.ConditionFalse, "Complete")
	if c := third.Status.Comparison; c == nil || c.CurrentLARMilli != next.Status.Comparison.CandidateLARMilli {
		t.Errorf("comparison %+v; want a current rate of %d, the rate of the tables in use on the same requests", c, next.Status.Comparison.CandidateLARMilli)
	}

	// If no change gains enough, or locality does not pay, the comparison reports the figures.
	small := replan("small", func(s *semmoev1.PlacementPlanSpec) { s.MinimumGainPercent, s.BatchTokens = ptr.To[int32](99), 8 })
	small = w.wait(small, semmoev1.ConditionReady, metav1.ConditionTrue, "LocalityDoesNotPay", "latency dominates")
	if small.Status.Tier != "" || small.Status.Verdict != semmoev1.VerdictLocalityDoesNotPay || small.Status.Comparison == nil {
		t.Errorf("tier %q, verdict %s, comparison %+v", small.Status.Tier, small.Status.Verdict, small.Status.Comparison)
	}

	for name, tc := range map[string]struct {
		change func(*semmoev1.PlacementPlanSpec)
		reason string
	}{
		"lost":  {func(s *semmoev1.PlacementPlanSpec) { s.Current.PlanDigest = strings.Repeat("0", 64) }, "CurrentPlanLost"},
		"other": {func(s *semmoev1.PlacementPlanSpec) { s.Current.TablesDigest = base.Status.PlanDigest }, "CurrentPlanInvalid"},
	} {
		w.wait(replan(name, tc.change), semmoev1.ConditionStalled, metav1.ConditionTrue, tc.reason, "spec.current")
	}
	w.wait(replan("absent", func(s *semmoev1.PlacementPlanSpec) { s.PriorProfileRef.Name = "absent" }), semmoev1.ConditionDegraded, metav1.ConditionTrue, "ProfileNotFound", "spec.priorProfileRef")
}

// TestReplanFromCounts checks that counts without sequences give new tables, and that they support only plans with
// spec.current.
func TestReplanFromCounts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before, after := traffic(t)
	old := w.newProfile("old")
	w.complete(old, before)
	base := w.newPlan("base", "old")
	base = w.wait(base, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	live := w.newProfile("live")
	w.completeLive(live, after)
	replan := func(p *semmoev1.PlacementPlan) {
		p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: base.Status.PlanDigest}
		p.Spec.MinimumGainPercent = ptr.To[int32](0)
	}
	next := w.newPlan("next", "live", replan)
	next = w.wait(next, semmoev1.ConditionReady, metav1.ConditionTrue, "Published", "counts do not show")
	if next.Status.Tier != semmoev1.TierTables || next.Status.Verdict != semmoev1.VerdictGain || next.Status.Forecast != nil || next.Status.Comparison.Requests != 0 {
		t.Errorf("tier %q, verdict %s, forecast %+v, comparison %+v", next.Status.Tier, next.Status.Verdict, next.Status.Forecast, next.Status.Comparison)
	}
	stored, encoded, err := bundle.FetchPlan(t.Context(), w.client, w.namespace, next.Status.PlanDigest)
	if err != nil || encoded.Manifest.Layout != base.Status.PlanDigest {
		t.Fatalf("the tables are not for the layout of the plan in service: %v", err)
	}
	current, _, err := bundle.FetchPlan(t.Context(), w.client, w.namespace, base.Status.PlanDigest)
	if err != nil || current.Schedule == nil || !cmp.Equal(current.Schedule, stored.Schedule) {
		t.Errorf("the schedule differs from that of the plan in service: %v", err)
	}
	w.wait(w.newPlan("standalone", "live"), semmoev1.ConditionStalled, metav1.ConditionTrue, "ProfileInvalid", "live counts")

	// A restored profile has another identity, and no result in the store. The ConfigMap of the plan, without an owner,
	// identifies the plan.
	kept := w.configMap(next.Status.ConfigMap)
	for _, lost := range []client.Object{next, live, kept, w.configMap(next.Status.StableConfigMap)} {
		w.delete(lost)
	}
	w.newProfile("live")
	restored := w.newPlan("next", "live", replan)
	w.wait(restored, semmoev1.ConditionReady, metav1.ConditionFalse, "WaitingForProfile")
	// Reconciles with an outdated cache may apply the ConfigMap again, even after the condition above. There is no garbage
	// collector in this test.
	kept.ObjectMeta = metav1.ObjectMeta{Namespace: kept.Namespace, Name: kept.Name, Labels: kept.Labels, Annotations: kept.Annotations}
	w.eventually("the ConfigMap has no owner", func() error {
		if err := api.DeleteAllOf(t.Context(), &corev1.ConfigMap{}, client.InNamespace(w.namespace), client.MatchingLabels(kept.Labels)); err != nil {
			return err
		}
		return api.Create(t.Context(), kept.DeepCopy())
	})
	restored = w.wait(restored, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if restored.Status.PlanDigest != next.Status.PlanDigest || restored.Status.Tier != semmoev1.TierTables || !metav1.IsControlledBy(w.configMap(kept.Name), restored) {
		t.Errorf("restored plan %s of tier %q, want %s of tier Tables", restored.Status.Plan, restored.Status.Tier, next.Status.Plan)
	}
}

// completeLive publishes the counts of a trace as the result of a live profile, and marks the profile ready.
func (w *world) completeLive(p *semmoev1.AffinityProfile, file []byte) {
	w.t.Helper()
	recorded, err := trace.Read(bytes.NewReader(file), 1<<30)
	if err != nil {
		w.t.Fatal(err)
	}
	m := recorded.Model
	model := profile.Model{Type: m.Type, Experts: m.Experts, TopK: m.TopK, Vocabulary: m.Vocabulary, Layers: m.Layers, HiddenLayers: m.HiddenLayers, HiddenSize: m.HiddenSize, Config: m.Config}
	c := counts.New(counts.Model{Digest: modelDigest, MoELayers: m.Layers, Experts: m.Experts, ExpertsPerToken: m.TopK, Vocabulary: m.Vocabulary})
	c.Add(recorded.Tokens, recorded.Experts)
	made, err := profile.FromCounts([]*counts.Counts{c}, model, modelDigest)
	if err != nil {
		w.t.Fatal(err)
	}
	scope := artifact.Scope{Namespace: w.namespace, Kind: artifact.Profile, ID: profile.LiveID(string(p.UID))}
	digest, err := profile.PublishLive(w.t.Context(), w.client, scope, made, profile.Manifest{
		ModelDigest: modelDigest, Live: &profile.Live{UID: string(p.UID), Samples: profile.LiveCounts, Model: model},
	}, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	w.report(p, scope.ID, digest)
}

// TestComparison checks that the status contains the comparison of the solver.
func TestComparison(t *testing.T) {
	if (*replanned)(nil).tier() != "" || (*replanned)(nil).comparison() != nil {
		t.Error("a plan that replaces none has a tier or a comparison")
	}
	score := func(lar, us float64) solver.Score {
		return solver.Score{LAR: lar, LayerTime: cost.LayerTime{Exchange: us}}
	}
	r := &replanned{solver.Decision{Tier: solver.LayoutTier, Verdict: solver.Gain, Reason: "why"}, score(0.3, 12.3456), score(0.45, 10), 7, 20, "h100"}
	want := &semmoev1.PlanComparison{CurrentLARMilli: 300, CandidateLARMilli: 450, CurrentNanos: 12346, CandidateNanos: 10000, Hardware: "h100", MovedExperts: 7, Reason: "why", Requests: 20}
	if diff := cmp.Diff(want, r.comparison()); diff != "" || r.tier() != semmoev1.TierLayout {
		t.Errorf("tier %s, comparison (-want +got):\n%s", r.tier(), diff)
	}
	r.Hardware = strings.Repeat("h", 64)
	if got, want := r.comparison().Hardware, strings.Repeat("h", 60)+"..."; got != want {
		t.Errorf("hardware %q, want %q", got, want)
	}
	if got := verdictOf(&solution{Replan: &replanned{Decision: solver.Decision{Verdict: solver.LocalityDoesNotPay}}}); got != semmoev1.VerdictLocalityDoesNotPay {
		t.Errorf("verdict %s", got)
	}
}
