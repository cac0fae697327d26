package moedeployment

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/checkpoint"
)

// start is when everything in these tests began.
var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// deployment is a MoEDeployment as the API server stores it, defaults included.
func deployment(change ...func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
	moed := &semmoev1.MoEDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", UID: "uid", Generation: 1},
		Spec: semmoev1.MoEDeploymentSpec{
			Model:       semmoev1.ModelSpec{Path: "/models", Volume: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/m"}}},
			Engine:      semmoev1.EngineSpec{Type: semmoev1.EngineSGLang, Image: "engine:1", Port: 30000},
			Parallelism: semmoev1.ParallelismSpec{Attention: semmoev1.AttentionDataParallel, ExpertParallelSize: 4, ResourceName: "nvidia.com/gpu"},
			Replicas:    ptr.To[int32](2),
			Placement:   semmoev1.PlacementSpec{Approval: semmoev1.ApprovalAutomatic, Solver: semmoev1.SolverSpec{TimeBudgetSeconds: 300, Seed: ptr.To[int64](1), TrainPercent: 80}},
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

func report() checkpoint.Report {
	return checkpoint.Report{Family: "qwen3_moe", Layers: 4, MoELayers: []int{0, 1, 2, 3}, Experts: 32, ExpertsPerToken: 4, ModelDigest: "sha256:abc"}
}

// pod is a running, ready engine pod of a revision.
func pod(name, revision string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(start),
			Labels: map[string]string{semmoev1.LabelDeployment: "m", semmoev1.LabelComponent: semmoev1.ComponentEngine, semmoev1.LabelRevision: revision},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func unready(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }
