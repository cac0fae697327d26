// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
)

// Objects that others reference are kept when the MoEDeployment no longer needs them, and an outdated spec causes no
// deletion.
func TestReferencedObjectsAreKept(t *testing.T) {
	plans := func() []*semmoev1.PlacementPlan {
		var list []*semmoev1.PlacementPlan
		for _, name := range []string{"gone", "pinned", "mounted", "projected", "ended"} {
			list = append(list, moedtest.PlanOf(name, "aa", func(p *semmoev1.PlacementPlan) { ours(p) }))
		}
		list = append(list, moedtest.PlanOf("layout", "ll", func(p *semmoev1.PlacementPlan) { ours(p) }))
		return list
	}
	profiles := func() []*semmoev1.AffinityProfile {
		var list []*semmoev1.AffinityProfile
		for _, name := range []string{"nobodys", "named", "planned", "prior"} {
			list = append(list, moedtest.ProfiledBy(name, "r", moedtest.Start, func(p *semmoev1.AffinityProfile) { ours(p) }))
		}
		return list
	}
	tables := moedtest.PlanOf("tables", "tt", func(p *semmoev1.PlacementPlan) {
		p.Status.Tier, p.Spec.Current = semmoev1.TierTables, &semmoev1.CurrentPlan{PlanDigest: moedtest.PlanOf("layout", "ll", nil).Status.PlanDigest}
		p.Spec.ProfileRef.Name = "elsewhere"
	})
	pinsTables := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Name, m.UID = "pins-tables", "uid-3"
		m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "tables"}
	})
	other := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Name, m.UID = "other", "uid-2"
		m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "pinned"}
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "named"}}
	})
	foreign := moedtest.PlanOf("foreign", "ff", func(p *semmoev1.PlacementPlan) {
		p.Spec.ProfileRef.Name, p.Spec.PriorProfileRef = "planned", &semmoev1.ProfileReference{Name: "prior"}
	})
	mounting := func(name string, volume corev1.VolumeSource, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Status: corev1.PodStatus{Phase: phase},
			Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "v", VolumeSource: volume}}},
		}
	}
	of := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	elsewhere := func(generation int64) []client.Object {
		return []client.Object{
			other, foreign, tables, pinsTables, moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Generation = generation }),
			mounting("a", corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: of("mounted-aa")}}, corev1.PodRunning),
			mounting("b", corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: of("projected-aa")}},
			}}}, corev1.PodPending),
			mounting("c", corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: of("ended-aa")}}, corev1.PodSucceeded),
		}
	}
	for name, tc := range map[string]struct {
		generation      int64
		plans, profiles []string
	}{
		"the spec as it is": {1, []string{"foreign", "layout", "mounted", "pinned", "projected", "tables"}, []string{"named", "planned", "prior"}},
		"an old spec":       {2, []string{"ended", "foreign", "gone", "layout", "mounted", "pinned", "projected", "tables"}, []string{"named", "nobodys", "planned", "prior"}},
	} {
		objects := elsewhere(tc.generation)
		for _, plan := range plans() {
			plan.Spec.ProfileRef.Name = "elsewhere"
			objects = append(objects, plan)
		}
		for _, profile := range profiles() {
			objects = append(objects, profile)
		}
		pl := shellOn(t, interceptor.Funcs{}, objects...)
		if _, err := pl.Plan(t.Context(), moedtest.Deployment(), moedtest.Report(), nil, nil); err != nil {
			t.Fatal(err)
		}
		var leftPlans semmoev1.PlacementPlanList
		var leftProfiles semmoev1.AffinityProfileList
		if err := errors.Join(pl.List(context.Background(), &leftPlans), pl.List(context.Background(), &leftProfiles)); err != nil {
			t.Fatal(err)
		}
		var planNames, profileNames []string
		for _, plan := range leftPlans.Items {
			planNames = append(planNames, plan.Name)
		}
		for _, profile := range leftProfiles.Items {
			profileNames = append(profileNames, profile.Name)
		}
		if !slices.Equal(planNames, tc.plans) || !slices.Equal(profileNames, tc.profiles) {
			t.Errorf("%s: left are plans %v and profiles %v, want %v and %v", name, planNames, profileNames, tc.plans, tc.profiles)
		}
	}
}

// A profile that an admission rule rejects does not change what the model serves under.
func TestRefusedProfile(t *testing.T) {
	refuse := interceptor.Funcs{Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "affinityprofiles"}, object.GetName(), errors.New("spec.template is at fault"))
	}}
	answers := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: revisions.AnswersName(moedtest.Deployment(), moedtest.Model), Labels: desired.Labels(moedtest.Deployment(), semmoev1.ComponentAnswers),
	}}
	pl := shellOn(t, refuse, answers)
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{
			Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, SamplingSpec: semmoev1.SamplingSpec{Requests: 100, Tokens: 10000, RequestTokens: 512},
			Target: semmoev1.ProfilingTargetDedicated,
		}
	})
	plan := moedtest.PlanOf("plan", "aa", nil)
	p, err := pl.Plan(context.Background(), moed, moedtest.Report(), []*revisions.Workload{workloadUnder(t, plan, 2)}, nil)
	var refused *writes.RefusedError
	if !errors.As(err, &refused) || !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "create AffinityProfile m-") {
		t.Errorf("error %v", err)
	}
	if p.Serving == nil || p.Serving.Digest != plan.Status.PlanDigest {
		t.Errorf("serving is %+v, want the layout in service", p.Serving)
	}
}

// repeater returns the same output for every prompt.
type repeater struct{}

func (repeater) RoundTrip(request *http.Request) (*http.Response, error) {
	const answer = `{"choices":[{"logprobs":{"tokens":["a"],"token_logprobs":[-0.1],"top_logprobs":[{"a":-0.1}]}}]}`
	return &http.Response{StatusCode: http.StatusOK, Status: "200 OK", Header: http.Header{}, Body: io.NopCloser(strings.NewReader(answer)), Request: request}, nil
}

// A rejection of auxiliary objects, by a quota or a policy, does not affect the serving plan or the candidate.
// Temporary errors are retried.
func TestRejectedAuxiliaryObjects(t *testing.T) {
	model := strings.Repeat("ab", 32)
	report := moedtest.Report()
	report.ModelDigest = model
	planOf := func(name, digest string, change ...func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
		return moedtest.PlanOf(name, digest, func(p *semmoev1.PlacementPlan) {
			p.Status.ModelDigest = model
			for _, c := range change {
				c(p)
			}
		})
	}
	plan := planOf("pinned", "aa")
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: plan.Name} })
	layout := revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	workload := func(under *revisions.Layout) *revisions.Workload {
		w, err := revisions.Render(moed, revisions.Of(moed, report, under), report, under, revisions.Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		*w.Replicas() = 1
		return w
	}
	answering := moedtest.Pod("m-r0-0", "r0", func(p *corev1.Pod) {
		p.Status.PodIP, p.Annotations = "10.0.0.1", map[string]string{semmoev1.AnnotationModelDigest: model, semmoev1.AnnotationPort: "30000"}
	})
	configMap := func(name, component string, data map[string]string) *corev1.ConfigMap {
		c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Data: data}
		ours(c)
		c.Labels = desired.Labels(moed, component)
		return c
	}
	stored := configMap(revisions.AnswersName(moed, model), semmoev1.ComponentAnswers, nil)
	swapped := planOf("swapped", "t1", func(p *semmoev1.PlacementPlan) { ours(p) })
	inService := []*revisions.Workload{workload(layout)}
	for name, tc := range map[string]struct {
		verb, object string
		objects      []client.Object
		workloads    []*revisions.Workload
		serving, try bool
		hold, tables string
	}{
		"answers are not stored":             {verb: "create", object: "m-answers", workloads: []*revisions.Workload{workload(nil)}, hold: "AwaitingBaselineOutputs"},
		"answers are not stored, on a trial": {verb: "create", object: "m-answers", workloads: []*revisions.Workload{trial(workload(layout)), workload(nil)}, try: true},
		"old answers stay":                   {verb: "delete", object: "m-answers-old", objects: []client.Object{stored, configMap("m-answers-old", semmoev1.ComponentAnswers, nil)}, workloads: inService, serving: true},
		"an obsolete plan stays":             {verb: "delete", object: "gone", objects: []client.Object{stored, planOf("gone", "cc", func(p *semmoev1.PlacementPlan) { ours(p) })}, workloads: inService, serving: true},
		"tables stay": {verb: "apply", object: "m-tables", workloads: inService, serving: true, tables: swapped.Name,
			objects: []client.Object{stored, swapped, configMap("m-tables", semmoev1.ComponentTables, map[string]string{semmoev1.TablesKey: `{"aa-full":"t1-full"}`})}},
	} {
		for why, refusal := range map[string]error{
			"refused": apierrors.NewForbidden(schema.GroupResource{Resource: "things"}, "x", errors.New("exceeded quota")),
			"passing": errors.New("connection refused"),
		} {
			t.Run(name+", "+why, func(t *testing.T) {
				fails := func(verb, object string) bool { return verb == tc.verb && strings.HasPrefix(object, tc.object) }
				pl := shellOn(t, interceptor.Funcs{
					Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
						if fails("create", object.GetName()) {
							return refusal
						}
						return c.Create(ctx, object, options...)
					},
					Delete: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.DeleteOption) error {
						if fails("delete", object.GetName()) {
							return refusal
						}
						return c.Delete(ctx, object, options...)
					},
					Apply: func(ctx context.Context, c client.WithWatch, intent runtime.ApplyConfiguration, options ...client.ApplyOption) error {
						if fails("apply", "m-tables") {
							return refusal
						}
						return c.Apply(ctx, intent, options...)
					},
				}, moed.DeepCopy(), plan.DeepCopy())
				for _, object := range tc.objects {
					if err := pl.Client.Create(t.Context(), object.DeepCopyObject().(client.Object)); err != nil {
						t.Fatal(err)
					}
				}
				pl.HTTP = &http.Client{Transport: repeater{}}
				p, err := pl.Plan(t.Context(), moed, report, tc.workloads, []*corev1.Pod{answering})
				if err == nil || writes.IsRefused(err) != (why == "refused") || !errors.Is(err, refusal) {
					t.Fatalf("error %v", err)
				}
				if why != "refused" {
					return
				}
				if (p.Serving != nil) != tc.serving || (p.Candidate != nil) != tc.try || p.Hold.Reason != tc.hold || nameOf(p.Tables) != tc.tables {
					t.Errorf("serving %+v, candidate %+v, hold %+v, tables %q", p.Serving, p.Candidate, p.Hold, nameOf(p.Tables))
				}
				if tc.hold != "" && !strings.Contains(p.Hold.Message, "exceeded quota") {
					t.Errorf("the hold says %q", p.Hold.Message)
				}
			})
		}
	}
}

// A rejected deletion of a profile is reported, and known to the next decision.
func TestRejectedDeletionIsKnown(t *testing.T) {
	refusal := apierrors.NewForbidden(schema.GroupResource{Resource: "affinityprofiles"}, "live", errors.New("profiles are locked"))
	live, other := moedtest.ProfiledBy("live", "r", moedtest.Start, func(p *semmoev1.AffinityProfile) { ours(p) }), moedtest.ProfiledBy("other", "r", moedtest.Start, func(p *semmoev1.AffinityProfile) { ours(p) })
	sh := shellOn(t, interceptor.Funcs{
		Delete: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.DeleteOption) error {
			if object.GetName() == live.Name {
				return refusal
			}
			return c.Delete(ctx, object, options...)
		},
	}, moedtest.Deployment(), live, other)
	if _, err := sh.Plan(t.Context(), moedtest.Deployment(), moedtest.Report(), nil, nil); !writes.IsRefused(err) || !sh.snapshot.Undeletable["live"] || sh.snapshot.Undeletable["other"] {
		t.Errorf("error %v, undeletable %v", err, sh.snapshot.Undeletable)
	}
}
