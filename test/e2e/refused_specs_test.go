// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/test/tier"
)

// TestInvalidSpecConditions creates objects that pass the schema without a webhook but cannot be realized. A condition of the
// object reports why, and no engine is started.
func TestInvalidSpecConditions(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	t.Run("MoEDeployment", func(t *testing.T) { t.Parallel(); checkRefusedDeployments(t, namespace) })
	t.Run("AffinityProfile", func(t *testing.T) { t.Parallel(); checkRefusedProfiles(t, namespace) })
	t.Run("PlacementPlan", func(t *testing.T) { t.Parallel(); checkRefusedPlans(t, namespace) })
}

func checkRefusedDeployments(t *testing.T, namespace string) {
	cases := map[string]func(*semmoev1.MoEDeployment){
		"RoutedExpertsUnavailable": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type = semmoev1.EngineTensorRTLLM
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/requests.jsonl"}}
		},
		"OverlapUnsupported": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type = semmoev1.EngineTensorRTLLM
			m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 2}
		},
		"InvalidPodsPerReplica": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type = semmoev1.EngineTensorRTLLM
			m.Spec.Parallelism.PodsPerReplica = ptr.To[int32](2)
		},
		"NoAllToAll": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Parallelism.Attention = semmoev1.EngineVLLM, semmoev1.AttentionTensorParallel
			m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "nobody"}}
		},
		"InvalidSpec": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Env = []corev1.EnvVar{{Name: "POD_IP", Value: "127.0.0.1"}}
		},
		"InvalidTemplate": func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				Containers: []corev1.Container{}, RestartPolicy: corev1.RestartPolicyNever,
			}}
		},
	}
	for reason, breaks := range cases {
		moed := newDeployment(namespace, strings.ToLower(reason), breaks)
		create(t, moed)
		waitCondition(t, moed, semmoev1.ConditionStalled, metav1.ConditionTrue, reason, "spec.")
		if workloads := listWorkloads(t, moed); len(workloads) > 0 {
			t.Errorf("%s: %d workloads, want none", reason, len(workloads))
		}
	}
	for name, tc := range templateAttacks() {
		moed := newDeployment(namespace, "t-"+name, func(m *semmoev1.MoEDeployment) { m.Spec.Template = tc.template })
		if tc.profileOnly {
			continue
		}
		create(t, moed)
		waitCondition(t, moed, semmoev1.ConditionStalled, metav1.ConditionTrue, "InvalidTemplate", tc.field)
		if workloads := listWorkloads(t, moed); len(workloads) > 0 {
			t.Errorf("%s: %d workloads, want none", name, len(workloads))
		}
	}
	privileged := newDeployment(namespace, "privileged", func(m *semmoev1.MoEDeployment) { m.Spec.Template = privilegedEngine() })
	create(t, privileged)
	waitCondition(t, privileged, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ContainerNotCreated", "privileged")
}

// templateAttack is a pod template that tries to take over a container of the operator or its contents.
type templateAttack struct {
	template *corev1.PodTemplateSpec
	field    string
	// profileOnly reports whether only profiling Jobs have the attacked container or data.
	profileOnly bool
}

func templateAttacks() map[string]templateAttack {
	of := func(spec corev1.PodSpec) *corev1.PodTemplateSpec {
		if spec.Containers == nil {
			spec.Containers = []corev1.Container{}
		}
		return &corev1.PodTemplateSpec{Spec: spec}
	}
	user := corev1.Container{Name: "user", Image: image, VolumeMounts: []corev1.VolumeMount{{Name: "semmoe-store-token", MountPath: "/t", ReadOnly: true}}}
	return map[string]templateAttack{
		"init-engine": {of(corev1.PodSpec{InitContainers: []corev1.Container{{Name: "engine", Image: "evil:1", Command: []string{"/evil"}}}}), "spec.template.spec.initContainers", false},
		"mount":       {of(corev1.PodSpec{Containers: []corev1.Container{user}}), "spec.template.spec.containers", false},
		"audience": {of(corev1.PodSpec{Volumes: []corev1.Volume{{Name: "own", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: artifact.Audience, Path: "t"}}},
		}}}}}), "spec.template.spec.volumes", false},
		"privileged-recorder": {of(corev1.PodSpec{Containers: []corev1.Container{{Name: "profile", SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(true)}}}}), "securityContext", true},
		"other-store":         {of(corev1.PodSpec{Containers: []corev1.Container{{Name: "profile", Env: []corev1.EnvVar{{Name: "SEMMOE_STORE_URL", Value: "https://evil"}}}}}), "SEMMOE_STORE_URL", true},
		"processes":           {of(corev1.PodSpec{ShareProcessNamespace: ptr.To(true)}), "spec.template.spec.shareProcessNamespace", true},
	}
}

// privilegedEngine returns a template for an engine that an unprivileged node cannot start.
func privilegedEngine() *corev1.PodTemplateSpec {
	return &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Name: semmoev1.EngineContainer, SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(true)},
	}}}}
}

func checkRefusedProfiles(t *testing.T, namespace string) {
	create(t, requests(t, namespace, 20))
	cases := map[string]func(*semmoev1.AffinityProfile){
		"RoutedExpertsUnavailable": func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Type = semmoev1.EngineTensorRTLLM },
		"OverlapUnsupported": func(p *semmoev1.AffinityProfile) {
			p.Spec.Engine.Type, p.Spec.Engine.Overlap = semmoev1.EngineVLLM, &semmoev1.OverlapSpec{CommunicationSMs: 8}
		},
		"ContradictingFlags": func(p *semmoev1.AffinityProfile) { p.Spec.Engine.Args = []string{"--ep-size=2"} },
		"InvalidSpec": func(p *semmoev1.AffinityProfile) {
			p.Spec.Engine.Env = []corev1.EnvVar{{Name: "POD_IP", Value: "127.0.0.1"}}
		},
		"InvalidTemplate": func(p *semmoev1.AffinityProfile) {
			p.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "sidecar"}}}}
		},
		"ModelInvalid": func(p *semmoev1.AffinityProfile) { p.Spec.Model.Path = "/models/nowhere" },
	}
	for reason, breaks := range cases {
		p := newProfile(namespace, strings.ToLower(reason), breaks)
		create(t, p)
		waitProfile(t, waitTimeout, p, semmoev1.ConditionStalled, metav1.ConditionTrue, reason)
		if jobs := listProfilingJobs(t, p); len(jobs) > 0 {
			t.Errorf("%s: %d profiling Jobs, want none", reason, len(jobs))
		}
	}
	for name, tc := range templateAttacks() {
		p := newProfile(namespace, "t-"+name, func(p *semmoev1.AffinityProfile) { p.Spec.Template = tc.template })
		create(t, p)
		waitProfile(t, waitTimeout, p, semmoev1.ConditionStalled, metav1.ConditionTrue, "InvalidTemplate", tc.field)
		if jobs := listProfilingJobs(t, p); len(jobs) > 0 {
			t.Errorf("%s: %d profiling Jobs, want none", name, len(jobs))
		}
	}
	// No two profiles record the same inputs, even if the first one cannot be scheduled.
	for i, reason := range []string{"Profiling", "WaitingForOtherProfile"} {
		p := newProfile(namespace, fmt.Sprintf("same-%d", i), func(p *semmoev1.AffinityProfile) {
			p.Spec.Parallelism.ResourceName, p.Spec.Requests = "example.com/none", 17
		})
		create(t, p)
		waitProfile(t, waitTimeout, p, semmoev1.ConditionProgressing, metav1.ConditionTrue, reason)
		waitProfile(t, waitTimeout, p, semmoev1.ConditionDegraded, metav1.ConditionTrue, "Unschedulable", "example.com/none")
	}
	privileged := newProfile(namespace, "privileged", func(p *semmoev1.AffinityProfile) {
		p.Spec.Requests, p.Spec.Template = 18, privilegedEngine()
	})
	create(t, privileged)
	waitProfile(t, waitTimeout, privileged, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ContainerNotCreated", "privileged")
	// A profile from live samples needs the profile of the serving plan.
	p := newProfile(namespace, "early", func(p *semmoev1.AffinityProfile) {
		p.Spec.Dataset, p.Spec.Target, p.Spec.DeploymentRef = nil, semmoev1.ProfilingTargetLive, &semmoev1.DeploymentReference{Name: "nobody"}
		p.Spec.Live = &semmoev1.LiveSpec{PriorProfileRef: semmoev1.ProfileReference{Name: "nobody"}}
	})
	create(t, p)
	waitProfile(t, waitTimeout, p, semmoev1.ConditionReady, metav1.ConditionFalse, "WaitingForInputs", "spec.live.priorProfileRef", "nobody")
}

func checkRefusedPlans(t *testing.T, namespace string) {
	storedProfile(t, namespace)
	unknown := strings.Repeat("0", 64)
	orphan, lost := newPlan(namespace, "orphan", 4), newPlan(namespace, "lost", 4)
	orphan.Spec.ProfileRef.Name = "nobody"
	lost.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: unknown}
	create(t, orphan)
	create(t, lost)
	waitPlan(t, orphan, semmoev1.ConditionDegraded, "ProfileNotFound", "spec.profileRef.name", "nobody")
	waitPlan(t, lost, semmoev1.ConditionStalled, "CurrentPlanLost", "spec.current", unknown)

	// Another user has taken the name of the ConfigMap that workloads mount.
	taken := newPlan(namespace, "taken", 4)
	foreign := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: taken.Name + "-plan"}, Data: map[string]string{"mine": "yes"}}
	create(t, foreign)
	create(t, taken)
	base := waitPlan(t, taken, semmoev1.ConditionDegraded, "ConfigMapConflict", foreign.Name)

	swapped := newPlan(namespace, "swapped", 4)
	swapped.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: unknown, TablesDigest: base.Status.PlanDigest}
	create(t, swapped)
	waitPlan(t, swapped, semmoev1.ConditionStalled, "CurrentPlanInvalid", "spec.current.tablesDigest")

	// With so few tokens per batch, layer time consists of latency, at any local activation rate.
	small := newPlan(namespace, "small", 4)
	small.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: base.Status.PlanDigest}
	small.Spec.MinimumGainPercent, small.Spec.BatchTokens = ptr.To[int32](99), 8
	create(t, small)
	waitPlan(t, small, semmoev1.ConditionReady, "LocalityDoesNotPay")
}

// TestRolloutBlockedConditions checks that a condition reports why a ready plan is not rolled out or cannot be used, and what
// must change. Most of these deployments have no replicas; the condition is set nevertheless.
func TestRolloutBlockedConditions(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	wide, foreign := newPlan(namespace, "wide", 8), newPlan(namespace, "foreign", 4)
	foreign.Spec.Engine = semmoev1.EngineVLLM
	create(t, wide)
	create(t, foreign)
	create(t, profileOfAnother(t, namespace, "another"))
	type deployment = *semmoev1.MoEDeployment
	pin := func(name string) func(deployment) {
		return func(m deployment) {
			m.Spec.Profiling, m.Spec.Placement.PlanRef = nil, &semmoev1.PlanReference{Name: name}
		}
	}
	for i, c := range []struct {
		kind, reason string
		change       func(deployment)
	}{
		{semmoev1.ConditionRolledOut, "NoRouter", func(m deployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone }},
		{semmoev1.ConditionRolledOut, "Advisory", func(m deployment) { m.Spec.Placement.Approval = semmoev1.ApprovalAdvisory }},
		{semmoev1.ConditionRolledOut, "AwaitingApproval", func(m deployment) { m.Spec.Placement.Approval = semmoev1.ApprovalManual }},
		{semmoev1.ConditionRolledOut, "UnsupportedByEngine", func(m deployment) {
			m.Spec.Engine.Type, m.Spec.Placement.Realization = semmoev1.EngineVLLM, semmoev1.RealizationEngineMap
		}},
		{semmoev1.ConditionPlanned, "NoGainExpected", func(m deployment) { m.Spec.Parallelism.ExpertParallelSize = 1 }},
		{semmoev1.ConditionDegraded, "ProfileNotFound", func(m deployment) { m.Spec.Profiling.ProfileRef.Name = "nobody" }},
		{semmoev1.ConditionDegraded, "ModelMismatch", func(m deployment) { m.Spec.Profiling.ProfileRef.Name = "another" }},
		{semmoev1.ConditionDegraded, "PlanNotFound", pin("nobody")},
		{semmoev1.ConditionDegraded, "ParallelismMismatch", pin(wide.Name)},
		{semmoev1.ConditionDegraded, "EngineMismatch", pin(foreign.Name)},
		{semmoev1.ConditionRolledOut, "RolloutInterruptsService", func(m deployment) { // without surge the only replica would be interrupted
			m.Spec.Replicas, m.Spec.Rollout.MaxSurge = ptr.To[int32](1), ptr.To[int32](0)
		}},
		{semmoev1.ConditionRolledOut, "CanaryInconclusive", func(m deployment) { // without samples the canary is not measured
			m.Spec.Replicas, m.Spec.Rollout.SoakSeconds, m.Spec.Routing.SamplePercent = ptr.To[int32](2), ptr.To[int32](1), ptr.To[int32](0)
		}},
	} {
		t.Run(c.reason, func(t *testing.T) {
			t.Parallel()
			moed := newDeployment(namespace, fmt.Sprintf("held-%d", i), func(m deployment) {
				m.Spec.Replicas = ptr.To[int32](0)
				m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "tiny"}}
			}, c.change)
			create(t, moed)
			eventually(t, waitTimeout, c.kind+" has reason "+c.reason, func() error {
				condition := meta.FindStatusCondition(get(t, moed).Status.Conditions, c.kind)
				if condition == nil || condition.Reason != c.reason {
					return fmt.Errorf("%s is %+v", c.kind, condition)
				}
				return nil
			})
		})
	}
}

// profileOfAnother creates a profile of a checkpoint other than the small model. It waits for a deployment that is
// never created.
func profileOfAnother(t *testing.T, namespace, name string) *semmoev1.AffinityProfile {
	t.Helper()
	dir := t.TempDir()
	copyCheckpoint(t, dir)
	file := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(text, '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	create(t, requests(t, namespace, 20))
	return newProfile(namespace, name, func(p *semmoev1.AffinityProfile) {
		p.Spec.Model.Volume.HostPath.Path = dir
		p.Spec.Target, p.Spec.DeploymentRef = semmoev1.ProfilingTargetServing, &semmoev1.DeploymentReference{Name: "nobody"}
	})
}

// TestPlanningWithoutRights blocks profiles and plans by revoked rights and by a quota. Conditions report the cause, and
// the objects are created once the block is removed.
func TestPlanningWithoutRights(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	granted := grantRights(t, namespace)
	startManagerAs(t, granted.config(), image, namespace, nil)
	waitProfiled(t, storedProfile(t, namespace))
	left := granted.role.Rules
	for _, resource := range []string{"statefulsets", "jobs", "configmaps"} {
		left = readOnly(left, resource)
	}
	restore := granted.revoke(t, left)
	create(t, requests(t, namespace, 10))
	plan, profile := newPlan(namespace, "tiny", 4), newProfile(namespace, "late")
	create(t, plan)
	create(t, profile)
	waitPlan(t, plan, semmoev1.ConditionDegraded, "ReconcileFailed", "forbidden", "configmaps")
	waitProfile(t, waitTimeout, profile, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ReconcileFailed", "forbidden", "jobs")
	quota := forbidPods(t, namespace)
	restore()
	published := waitPlan(t, plan, semmoev1.ConditionReady, "Published")
	waitProfile(t, waitTimeout, profile, semmoev1.ConditionDegraded, metav1.ConditionTrue, "PodsRejected", "exceeded quota")
	if err := api.Delete(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	waitProfiled(t, profile)
	// The profile that the quota delayed has too few requests for a plan that replaces another one.
	few := newPlan(namespace, "few", 4)
	few.Spec.ProfileRef.Name, few.Spec.Current = profile.Name, &semmoev1.CurrentPlan{PlanDigest: published.Status.PlanDigest}
	create(t, few)
	waitPlan(t, few, semmoev1.ConditionStalled, "TooFewRequests")
}
