// SPDX-License-Identifier: Apache-2.0

// Package moedtest contains fixtures for tests of the MoEDeployment controller.
package moedtest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/overlap"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/schedule"
)

// Observed returns a request under the layout "ab-full" that was sampled before seconds before Start and scored by
// tables.
func Observed(before int, tables string, local int64) lar.Observation {
	return lar.Observation{
		Time: Start.Add(-time.Duration(before) * time.Second), Revision: "r1", Plan: "ab-full", Rank: 1, Count: lar.Count{Activations: lar.Activations{Local: local, Total: 100}},
		Forecast: &lar.Forecast{Tables: tables, Best: 1, Highest: 0.4, Predicted: 0.4, Known: 1, Pairs: 1},
	}
}

func sum(text []byte) string {
	digest := sha256.Sum256(text)
	return hex.EncodeToString(digest[:])
}

// WithCalibration returns the content of the ConfigMap of a plan with a calibration, and the plan's digest.
func WithCalibration(t *testing.T, c *drift.Calibration) (data map[string]string, digest string) {
	t.Helper()
	content, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := json.Marshal(plan.Manifest{Files: map[string]string{plan.DriftFile: sum(content)}})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{plan.ManifestFile: string(manifest), plan.DriftFile: string(content)}, sum(manifest)
}

// Calibration returns a calibration that expects 0.4 for every request on either of two ranks, and all tokens to be
// known.
func Calibration() *drift.Calibration {
	flat := []float64{0.4, 0.4, 0.4, 0.4}
	return &drift.Calibration{
		Ranks: 2, Requests: 1000, FalseAlarms: 1e-7, Highest: flat, Predicted: flat, Local: flat, Slopes: drift.Slopes{Best: 1, Predicted: 1}, Chance: 0.25,
		Usual:    drift.Usual{Served: 0.4, Best: 0.4, Known: 1},
		Residual: drift.Chart{Reference: 0.05, Threshold: 2}, Level: drift.Chart{Reference: 0.1, Threshold: 4}, Novelty: drift.Chart{Reference: 0.2, Threshold: 10},
	}
}

// PlanFor400 returns the plan in use, created a day ago, which predicts 40.0%.
func PlanFor400() *semmoev1.PlacementPlan {
	return PlanOf("p", "ab", func(p *semmoev1.PlacementPlan) { p.CreationTimestamp = metav1.NewTime(Start.Add(-24 * time.Hour)) })
}

// Values returns points one minute apart, the last one now.
func Values(list ...float64) []lar.Point {
	points := make([]lar.Point, len(list))
	for i, value := range list {
		points[i] = lar.Point{Time: Start.Add(time.Duration(i-len(list)+1) * time.Minute), Value: value}
	}
	return points
}

// Start is the start time of the tests.
var Start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// Deployment returns a MoEDeployment as stored by the API server, with defaults.
func Deployment(change ...func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
	moed := &semmoev1.MoEDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", UID: "uid", Generation: 1},
		Spec: semmoev1.MoEDeploymentSpec{
			Model:       semmoev1.ModelSpec{Path: "/models", Volume: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/m"}}},
			Engine:      semmoev1.EngineSpec{Type: semmoev1.EngineSGLang, Image: "engine:1", Port: 30000},
			Parallelism: semmoev1.ParallelismSpec{Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 4, ResourceName: "nvidia.com/gpu"},
			Replicas:    ptr.To[int32](2),
			Placement:   semmoev1.PlacementSpec{Approval: semmoev1.ApprovalAutomatic, LayoutSpec: semmoev1.LayoutSpec{Solver: semmoev1.SolverSpec{TimeBudgetSeconds: 300, Seed: ptr.To[int64](1), TrainPercent: 80}}},
			Routing:     semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, Replicas: 2},
			Rollout:     semmoev1.RolloutSpec{MaxUnavailable: ptr.To[int32](1), MaxSurge: ptr.To[int32](0), CanaryReplicas: 1, SoakSeconds: ptr.To[int32](300), Rollback: semmoev1.RollbackAutomatic},
			Drift: semmoev1.DriftSpec{
				Source: semmoev1.DriftSourceRouter, ThresholdPercent: 10, WindowSeconds: 3600, CooldownSeconds: ptr.To[int32](3600), MaxReplansPerDay: ptr.To[int32](4),
			},
			Reconciliation: semmoev1.ReconciliationActive,
		},
	}
	for _, c := range change {
		c(moed)
	}
	return moed
}

func Report() checkpoint.Report {
	return checkpoint.Report{Family: "qwen3_moe", Layers: 4, MoELayers: []int{0, 1, 2, 3}, Experts: 32, ExpertsPerToken: 4, ModelDigest: "sha256:abc"}
}

// Pod returns a running, ready engine pod of a revision.
func Pod(name, revision string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(Start),
			Labels: map[string]string{semmoev1.LabelDeployment: "m", semmoev1.LabelComponent: semmoev1.ComponentEngine, semmoev1.LabelRevision: revision},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func Unready(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func TwoPods(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.PodsPerReplica = ptr.To[int32](2) }

// Model is the digest of the fixtures' checkpoint.
const Model = "sha256:abc"

// PlanOf returns a published plan for the fixtures' deployment.
func PlanOf(name, digest string, change func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
	plan := &semmoev1.PlacementPlan{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: semmoev1.PlacementPlanSpec{
			ProfileRef: semmoev1.ProfileReference{Name: "p"}, Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 4, Engine: semmoev1.EngineSGLang,
		},
		Status: semmoev1.PlacementPlanStatus{
			Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Published", Message: "m"}},
			Plan:       digest, PlanDigest: digest + "-full", ModelDigest: Model, ConfigMap: name + "-" + digest, Verdict: semmoev1.VerdictGain,
			Forecast: &semmoev1.PlanForecast{LARMilli: 400, BaselineMilli: 250, LARSummary: "40.0%", BaselineSummary: "25.0%"},
		},
	}
	if change != nil {
		change(plan)
	}
	return plan
}

// EngineOf sets the engine, and requests a profile.
func EngineOf(engine semmoev1.EngineType) func(*semmoev1.MoEDeployment) {
	return func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Type = engine
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "p"}}
	}
}

// InGroup makes a pod part of a group of two.
func InGroup(set, group, index string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Labels[leaderworkersetv1.SetNameLabelKey], p.Labels[leaderworkersetv1.GroupIndexLabelKey] = set, group
		p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(Start)
		if index == "0" {
			p.Annotations = map[string]string{semmoev1.AnnotationPodsPerReplica: "2"}
		} else {
			p.Labels[semmoev1.LabelComponent] = semmoev1.ComponentWorker
		}
	}
}

func ChangedAt(after time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(Start.Add(after))
	}
}

// GroupScheme returns a scheme with all kinds that the controller reads and writes.
func GroupScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), semmoev1.AddToScheme(scheme), leaderworkersetv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	return scheme
}

// Cluster returns a fake cluster, or its cache, with these objects. It supports field selection by name for
// MoEDeployments, plans and their children, like an API server.
func Cluster(t *testing.T, objects ...client.Object) client.WithWatch {
	t.Helper()
	builder := fake.NewClientBuilder().WithScheme(GroupScheme(t)).WithObjects(objects...)
	for _, kind := range []client.Object{
		&semmoev1.MoEDeployment{}, &semmoev1.PlacementPlan{}, &appsv1.Deployment{}, &corev1.ConfigMap{}, &corev1.Service{}, &corev1.ServiceAccount{}, &networkingv1.NetworkPolicy{},
		&policyv1.PodDisruptionBudget{}, &rbacv1.RoleBinding{},
	} {
		builder.WithIndex(kind, "metadata.name", func(object client.Object) []string { return []string{object.GetName()} })
	}
	return builder.Build()
}

// Tokens sets ranks for tokens instead of requests, with an all-to-all backend.
func Tokens(m *semmoev1.MoEDeployment) {
	m.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel
	m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"}
}

// Shuffled additionally enables token shuffling by the plan's tables.
func Shuffled(m *semmoev1.MoEDeployment) {
	Tokens(m)
	m.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleEnabled
}

// Hardware references a ConfigMap with a hardware profile.
func Hardware(name string) *semmoev1.HardwareReference {
	return &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: name, Key: "hardware.json"}}
}

// OnHardware sets the hardware profile of a MoEDeployment.
func OnHardware(of *semmoev1.HardwareReference) func(*semmoev1.MoEDeployment) {
	return func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Hardware = of }
}

// ProfiledBy returns a complete profile of the fixtures' model, created at made.
func ProfiledBy(name, digest string, made time.Time, change ...func(*semmoev1.AffinityProfile)) *semmoev1.AffinityProfile {
	p := &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(made)},
		Status: semmoev1.AffinityProfileStatus{
			Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Profiled"}},
			Result:     &semmoev1.ProfileResult{Digest: digest, Tokens: 1000, TracedTokens: 1000}, Model: &semmoev1.ModelStatus{Digest: Model},
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

// OverlapModel returns the models of a plan for DeepSeek-V2 on the ranks of the fixtures' deployment.
func OverlapModel(t *testing.T) *overlap.Model {
	t.Helper()
	m, err := overlapModel()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

var overlapModel = sync.OnceValues(func() (*overlap.Model, error) {
	machines := hardware.DefaultProfile()
	shape := &pipeline.Shape{
		HiddenLayers: 60, MoELayers: 59, Experts: 160, TopK: 6, Hidden: 5120, ExpertSize: 1536, SharedSize: 3072, DenseSize: 12288,
		Heads: 128, KVHeads: 128, QueryDim: 192, ValueDim: 128, KVRank: 512, QueryRank: 1536, RopeDim: 64,
	}
	made, err := schedule.Of(shape, machines, schedule.Inputs{Ranks: 4, SlotsPerRank: 40, LAR: 0.4})
	return &overlap.Model{Schedule: made, Hardware: machines, SlotsPerRank: 40}, err
})

// WithOverlapModel returns the content of the ConfigMap of a plan with these models, and the plan's digest.
func WithOverlapModel(t *testing.T) (data map[string]string, digest string) {
	t.Helper()
	m := OverlapModel(t)
	manifest := plan.Manifest{Files: map[string]string{}}
	data = map[string]string{}
	for name, content := range map[string]any{
		plan.PlacementFile: placement.Contiguous([]int{1}, m.Schedule.Model.Experts, m.Schedule.Ranks), plan.ScheduleFile: m.Schedule, plan.HardwareFile: m.Hardware,
	} {
		text, err := json.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		data[name], manifest.Files[name] = string(text), sum(text)
	}
	text, err := json.Marshal(manifest)
	if err != nil {
		t.Fatal(err)
	}
	data[plan.ManifestFile] = string(text)
	return data, sum(text)
}

// OverlapAuto lets the operator choose the overlap settings of an engine with an all-to-all backend, for a plan.
func OverlapAuto(engine semmoev1.EngineType) func(*semmoev1.MoEDeployment) {
	return func(m *semmoev1.MoEDeployment) {
		EngineOf(engine)(m)
		m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}
		switch engine {
		case semmoev1.EngineSGLang:
			m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"}
		case semmoev1.EngineVLLM:
			m.Spec.Engine.Image, m.Spec.Engine.Args = "vllm/vllm-openai:v0.30.0", []string{"--all2all-backend", "deepep_high_throughput"}
		}
	}
}
