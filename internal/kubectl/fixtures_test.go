// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// now is the present time in tests.
var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

const (
	namespace   = "llm"
	modelDigest = "12d5826cf5abe4fb7d8cbb5b37dc9a62189d38125f3c1defb87ca8162049ff1b"
	// The digests of two plans, and their short forms.
	firstDigest  = "b509accef77e719e4b7d8cbb5b37dc9a62189d38125f3c1defb87ca8162049ff"
	secondDigest = "6020771edb47c715a1f00dbb5b37dc9a62189d38125f3c1defb87ca8162049ff"
	firstPlan    = "b509accef77e719e"
	secondPlan   = "6020771edb47c715"
)

// conditions returns conditions from groups of four strings: type, status, reason and message.
func conditions(fields ...string) []metav1.Condition {
	var all []metav1.Condition
	for i := 0; i+3 < len(fields); i += 4 {
		all = append(all, metav1.Condition{
			Type: fields[i], Status: metav1.ConditionStatus(fields[i+1]), Reason: fields[i+2], Message: fields[i+3],
			ObservedGeneration: 1, LastTransitionTime: before(5 * time.Minute),
		})
	}
	return all
}

func named(name string, age time.Duration, labels ...string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: namespace, Name: name, CreationTimestamp: before(age), Labels: map[string]string{}}
	for i := 0; i+1 < len(labels); i += 2 {
		m.Labels[labels[i]] = labels[i+1]
	}
	return m
}

func ofQwen(name string, age time.Duration, component string, labels ...string) metav1.ObjectMeta {
	return named(name, age, append(labels, semmoev1.LabelDeployment, "qwen", semmoev1.LabelComponent, component)...)
}

// deployment returns a deployment with a first plan that waits for approval, and applies changes.
func deployment(changes ...func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
	moed := &semmoev1.MoEDeployment{
		ObjectMeta: named("qwen", time.Hour),
		Spec: semmoev1.MoEDeploymentSpec{
			Model:       semmoev1.ModelSpec{Path: "/models/qwen"},
			Engine:      semmoev1.EngineSpec{Type: semmoev1.EngineSGLang, Image: "engine:1"},
			Parallelism: semmoev1.ParallelismSpec{Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 2},
			Replicas:    ptr.To[int32](2), Reconciliation: semmoev1.ReconciliationActive,
			Placement: semmoev1.PlacementSpec{Approval: semmoev1.ApprovalManual},
			Profiling: &semmoev1.ProfilingSpec{LiveSamples: semmoev1.LiveSamplesCounts},
			Rollout:   semmoev1.RolloutSpec{MinimumGainPercent: ptr.To[int32](2)},
			Drift:     semmoev1.DriftSpec{ThresholdPercent: 10},
		},
		Status: semmoev1.MoEDeploymentStatus{
			ObservedGeneration: 1, Replicas: 2, ReadyReplicas: 2, UpdatedReplicas: 2, Summary: "2/2", Revision: "38df6bb89e",
			Endpoint: "http://qwen.llm.svc:8000", Profile: "qwen-3e5a82bb", Plan: "qwen-c65ee2b4",
			LAR:   &semmoev1.LARStatus{BaselineMilli: ptr.To[int32](257), ObservedMilli: ptr.To[int32](252)},
			Model: &semmoev1.ModelStatus{Digest: modelDigest, Family: "qwen3_moe", Layers: 48, MoELayers: 48, Experts: 128, ExpertsPerToken: 8},
			Conditions: conditions(
				"Ready", "True", "Serving", "2 of 2 replicas serve at http://qwen.llm.svc:8000",
				"Progressing", "False", "Complete", "All 2 replicas are of revision 38df6bb89e",
				"Degraded", "False", "AsExpected", "Nothing is wrong",
				"Stalled", "False", "NotStalled", "No user action is required",
				"Reconciling", "False", "Complete", "Generation 1 is in service",
				"Profiled", "True", "Profiled", "AffinityProfile qwen-3e5a82bb holds 200000 tokens of 2000 requests",
				"Planned", "True", "Planned", "PlacementPlan qwen-c65ee2b4 (b509accef77e719e) promises a local activation rate of 43.2%; the default placement has 25.7%",
				"RolledOut", "False", "AwaitingApproval", "Plan b509accef77e719e promises 43.2% against 25.7% without it; approve it with: kubectl annotate moed -n llm qwen semmoe.io/approve=b509accef77e719e --overwrite",
				"LocalityOnTarget", "Unknown", "NoPlan", "Without a plan there is no promised local activation rate to compare with",
			),
		},
	}
	for _, change := range changes {
		change(moed)
	}
	return moed
}

// canary changes a deployment to one with a second plan in its canary phase, next to the first plan.
func canary(moed *semmoev1.MoEDeployment) {
	message := "Plan 6020771edb47c715 is tried on 1 of 2 replicas: it is compared with the stable revision"
	moed.Status.PlanDigest, moed.Status.Plan, moed.Status.ReadyReplicas = firstPlan, "qwen-5d0d71aa", 1
	moed.Status.LAR = &semmoev1.LARStatus{BaselineMilli: ptr.To[int32](257), PredictedMilli: ptr.To[int32](432), ObservedMilli: ptr.To[int32](276)}
	moed.Status.Drift = &semmoev1.DriftStatus{StatisticMilli: 4200, ThresholdMilli: 1000, Since: ptr.To(before(20 * time.Minute))}
	moed.Status.Rollout = &semmoev1.RolloutStatus{
		Phase: semmoev1.RolloutPhaseCanary, Since: before(3 * time.Minute), StableRevision: "38df6bb89e", CandidateRevision: "b293798526", CandidatePlan: secondPlan, Message: message,
	}
	set(moed, "RolledOut", "False", "Canary", message)
	set(moed, "Progressing", "True", "RollingOut", "Plan 6020771edb47c715 is tried")
}

func set(moed *semmoev1.MoEDeployment, kind, status, reason, message string) {
	for i := range moed.Status.Conditions {
		if c := &moed.Status.Conditions[i]; c.Type == kind {
			c.Status, c.Reason, c.Message = metav1.ConditionStatus(status), reason, message
		}
	}
}

func underArgo(moed *semmoev1.MoEDeployment) {
	moed.Annotations = map[string]string{"argocd.argoproj.io/tracking-id": "models:semmoe.io/MoEDeployment:llm/qwen"}
}

func profiles() []client.Object {
	return []client.Object{&semmoev1.AffinityProfile{
		ObjectMeta: ofQwen("qwen-3e5a82bb", 50*time.Minute, semmoev1.ComponentProfile),
		Status: semmoev1.AffinityProfileStatus{
			Conditions: conditions("Ready", "True", "Profiled", "The profile is in the store"), Inputs: "3e5a82bb",
			Result: &semmoev1.ProfileResult{Digest: firstDigest, Requests: 2000, Tokens: 200000, TracedTokens: 200000},
			Model:  &semmoev1.ModelStatus{Digest: modelDigest, Family: "qwen3_moe", Layers: 48, MoELayers: 48, Experts: 128, ExpertsPerToken: 8},
		},
	}}
}

// profiling returns a profile in progress, and its Job.
func profiling() []client.Object {
	return []client.Object{
		&semmoev1.AffinityProfile{
			ObjectMeta: ofQwen("qwen-3e5a82bb", 5*time.Minute, semmoev1.ComponentProfile),
			Status: semmoev1.AffinityProfileStatus{
				Conditions: conditions("Ready", "False", "Profiling", "840 of 2000 requests are answered"),
				Progress:   &semmoev1.ProfileProgress{RequestsDone: 840, RequestsTotal: 2000, TokensPerSecond: 1300, RemainingSeconds: 95},
			},
		},
		&batchv1.Job{ObjectMeta: named("qwen-3e5a82bb-1", 4*time.Minute, semmoev1.LabelProfile, "qwen-3e5a82bb", semmoev1.LabelComponent, semmoev1.ComponentProfile)},
	}
}

func planned(name, digest string, age time.Duration, changes ...func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
	p := &semmoev1.PlacementPlan{
		ObjectMeta: ofQwen(name, age, semmoev1.ComponentPlan),
		Spec: semmoev1.PlacementPlanSpec{
			ProfileRef: semmoev1.ProfileReference{Name: "qwen-3e5a82bb"}, Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 2, Engine: semmoev1.EngineSGLang,
			Realization: semmoev1.RealizationEngineMap, LayoutSpec: semmoev1.LayoutSpec{Solver: semmoev1.SolverSpec{TimeBudgetSeconds: 300, Seed: ptr.To[int64](1), TrainPercent: 80}},
		},
		Status: semmoev1.PlacementPlanStatus{
			Conditions: conditions("Ready", "True", "Published", "The plan is published as ConfigMap "+name+"-"+digest[:16]),
			Plan:       digest[:16], PlanDigest: digest, ModelDigest: modelDigest, ConfigMap: name + "-" + digest[:16], Verdict: semmoev1.VerdictGain,
			Forecast: &semmoev1.PlanForecast{LARMilli: 432, BaselineMilli: 257, UpperBoundMilli: 611, WindowImbalanceMilli: 1077, LARSummary: "43.2%", BaselineSummary: "25.7%"},
		},
	}
	for _, change := range changes {
		change(p)
	}
	return p
}

// replan changes a plan to one that replaces the first plan.
func replan(p *semmoev1.PlacementPlan) {
	p.Labels[semmoev1.LabelBase] = "qwen-c65ee2b4"
	p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: firstDigest, TargetLARMilli: 388}
	p.Spec.PriorProfileRef, p.Spec.MinimumGainPercent = &semmoev1.ProfileReference{Name: "qwen-3e5a82bb"}, ptr.To[int32](2)
	p.Status.Tier = semmoev1.TierLayout
	p.Status.Forecast.LARMilli, p.Status.Forecast.LARSummary, p.Status.Forecast.WindowImbalanceMilli = 352, "35.2%", 1104
	p.Status.Comparison = &semmoev1.PlanComparison{
		CurrentLARMilli: 276, CandidateLARMilli: 352, CurrentNanos: 121300, CandidateNanos: 108900, Hardware: "h200-nvlink", MovedExperts: 214, Requests: 180,
		Reason: "new tables alone would come to 30.1%",
	}
}

func worthless(p *semmoev1.PlacementPlan) {
	p.Status.Verdict = semmoev1.VerdictNoGainExpected
	p.Status.Forecast.LARMilli, p.Status.Forecast.LARSummary = 259, "25.9%"
}

func stateful(name, revision, digest string, ready bool) []client.Object {
	meta := ofQwen(name, 30*time.Minute, semmoev1.ComponentEngine, semmoev1.LabelRevision, revision)
	meta.UID = types.UID("uid of " + name)
	set := &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Replicas: ptr.To[int32](1)}, Status: appsv1.StatefulSetStatus{ReadyReplicas: 1}}
	if digest != "" {
		set.Spec.Template.Annotations = map[string]string{semmoev1.AnnotationPlanDigest: digest}
	}
	pod := &corev1.Pod{
		ObjectMeta: ofQwen(name+"-0", 20*time.Minute, semmoev1.ComponentEngine, semmoev1.LabelRevision, revision),
		Spec:       corev1.PodSpec{NodeName: "node-1"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("StatefulSet"))}
	if !ready {
		pod.Status.Conditions[0].Status = corev1.ConditionFalse
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "engine", RestartCount: 3, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
		}}
	}
	return []client.Object{set, pod}
}

func routers() []client.Object {
	objects := []client.Object{&appsv1.Deployment{
		ObjectMeta: ofQwen("qwen-router", time.Hour, semmoev1.ComponentRouter),
		Spec:       appsv1.DeploymentSpec{Replicas: ptr.To[int32](2)}, Status: appsv1.DeploymentStatus{ReadyReplicas: 2},
	}}
	for i := range 2 {
		objects = append(objects, &corev1.Pod{
			ObjectMeta: ofQwen(fmt.Sprintf("qwen-router-6b7f-%d", i), time.Hour, semmoev1.ComponentRouter),
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "router", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8000}, {Name: "metrics", ContainerPort: 9090}}}}},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		})
	}
	return objects
}
