// SPDX-License-Identifier: Apache-2.0

package front

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	policyac "k8s.io/client-go/applyconfigurations/policy/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/router/managerauth"
)

// Arguments do not contain options that the spec leaves open: an upgrade of the operator that adds a flag must not
// restart routers.
func TestRouterArgs(t *testing.T) {
	always := []string{
		"router", "--namespace=ns", "--selector=semmoe.io/deployment=m,semmoe.io/component in (engine,worker)", "--engine=SGLang", "--sample-percent=0",
		"--host=$(POD_IP)", "--drain-timeout=300s",
	}
	cases := map[string]struct {
		routing semmoev1.RoutingSpec
		more    []string
		ports   []string
	}{
		"defaults":        {semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter}, nil, []string{"http 8000", "metrics 9090", "private 9091"}},
		"endpoint picker": {semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeEndpointPicker}, []string{"--endpoint-picker"}, []string{"ext-proc 9002", "health 9003", "metrics 9090", "private 9091"}},
		"weights": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, Weights: &semmoev1.RoutingWeights{AffinityPercent: ptr.To[int32](0), PrefixPercent: ptr.To[int32](105)}},
			[]string{"--weights=affinity=0,prefix=1.05,load=1,wait=1"}, []string{"http 8000", "metrics 9090", "private 9091"},
		},
		"queueing": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, Weights: &semmoev1.RoutingWeights{WaitPercent: ptr.To[int32](50)}},
			[]string{"--weights=affinity=1,prefix=1,load=1,wait=0.5"}, []string{"http 8000", "metrics 9090", "private 9091"},
		},
		"hold": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, HoldMilliseconds: ptr.To[int32](150)},
			[]string{"--hold=150ms"}, []string{"http 8000", "metrics 9090", "private 9091"},
		},
		"limit": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, PendingLimitPerRank: ptr.To[int32](32)},
			[]string{"--pending-limit-per-rank=32"}, []string{"http 8000", "metrics 9090", "private 9091"},
		},
		"KV events": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, KVEvents: &semmoev1.RoutingKVEvents{Port: 5557}},
			[]string{"--kv-events-port=5557"}, []string{"http 8000", "metrics 9090", "private 9091"},
		},
		"further routes": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, PassThrough: []string{"/v1/custom", "/flush_cache", "/plugin/run"}},
			[]string{"--pass-through=/v1/custom,/plugin/run"}, []string{"http 8000", "metrics 9090", "private 9091"},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing = tc.routing })
			pod := routerDeployment(moed, "semmoe:1", "uid", "PEM").Spec.Template.Spec
			container := pod.Containers[0]
			if diff := cmp.Diff(append(slices.Clone(always), tc.more...), container.Args); diff != "" {
				t.Errorf("arguments (-want +got):\n%s", diff)
			}
			var ports []string
			for _, port := range container.Ports {
				ports = append(ports, fmt.Sprintf("%s %d", *port.Name, *port.ContainerPort))
			}
			if diff := cmp.Diff(tc.ports, ports); diff != "" {
				t.Errorf("ports (-want +got):\n%s", diff)
			}
			authority := slices.IndexFunc(container.Env, func(v coreac.EnvVarApplyConfiguration) bool { return *v.Name == managerauth.AuthorityVariable })
			if authority < 0 || container.Env[authority].Value == nil || *container.Env[authority].Value != "PEM" {
				t.Errorf("$%s is not the managers' authority: without it, the router refuses its observations to managers", managerauth.AuthorityVariable)
			}
			if grace, drain := *pod.TerminationGracePeriodSeconds, *container.Lifecycle.PreStop.Sleep.Seconds+desired.GraceSeconds; grace <= drain {
				t.Errorf("a router is killed after %d s, while it may drain for %d s", grace, drain)
			}
		})
	}
}

// The router of a profiled deployment mounts the ConfigMap that selects its tables, and starts without it.
func TestRouterTables(t *testing.T) {
	of := func(profiling *semmoev1.ProfilingSpec) *coreac.PodSpecApplyConfiguration {
		return routerDeployment(moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = profiling }), "semmoe:1", "uid", "PEM").Spec.Template.Spec
	}
	plain, profiled := of(nil), of(&semmoev1.ProfilingSpec{})
	for _, pod := range []*coreac.PodSpecApplyConfiguration{plain, profiled} {
		if got := slices.Contains(pod.Containers[0].Args, "--tables-file=/etc/semmoe/tables/tables.json"); got != (pod == profiled) {
			t.Errorf("arguments %q", pod.Containers[0].Args)
		}
	}
	mount := coreac.VolumeMount().WithName("tables").WithMountPath("/etc/semmoe/tables").WithReadOnly(true)
	if diff := cmp.Diff(append(slices.Clone(plain.Containers[0].VolumeMounts), *mount), profiled.Containers[0].VolumeMounts); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}
	volume := coreac.Volume().WithName("tables").WithConfigMap(coreac.ConfigMapVolumeSource().WithName("m-tables").WithOptional(true))
	if diff := cmp.Diff(append(slices.Clone(plain.Volumes), *volume), profiled.Volumes); diff != "" {
		t.Errorf("volumes (-want +got):\n%s", diff)
	}
}

// A Service that selects the engines switches to the routers as soon as a router pod of the current template is
// available.
func TestUpdatedAvailable(t *testing.T) {
	cases := map[string]struct {
		generation                   int64 // observed generation
		replicas, updated, available int32
		want                         bool
	}{
		"all available":                    {2, 3, 3, 3, true},
		"not observed yet":                 {1, 3, 3, 3, false},
		"first pod available":              {2, 3, 3, 1, true},
		"none yet":                         {2, 3, 3, 0, false},
		"one new, old ones available":      {2, 4, 1, 4, true},
		"one starting, old ones available": {2, 4, 1, 3, false},
		"mixed, by count":                  {2, 4, 2, 3, true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			router := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Status: appsv1.DeploymentStatus{
				ObservedGeneration: tc.generation, Replicas: tc.replicas, UpdatedReplicas: tc.updated, AvailableReplicas: tc.available,
			}}
			if got := updatedAvailable(router); got != tc.want {
				t.Errorf("one is available: %v, want %v", got, tc.want)
			}
		})
	}
}

// Routers store token sequences only on request, because sequences contain prompts.
func TestRouterKeepsSequencesOnDemand(t *testing.T) {
	for samples, want := range map[semmoev1.LiveSamples]bool{semmoev1.LiveSamplesCounts: false, semmoev1.LiveSamplesSequences: true, "": false} {
		args := routerArgs(moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = &semmoev1.ProfilingSpec{LiveSamples: samples} }))
		if got := slices.Contains(args, "--live-samples=sequences"); got != want {
			t.Errorf("liveSamples %q: arguments %v", samples, args)
		}
	}
}

// The request router uses the pull secrets of the template, and none of the engine's variables.
func TestRouterPullSecrets(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			ImagePullSecrets: []corev1.LocalObjectReference{{Name: "registry"}},
			Containers:       []corev1.Container{{Name: semmoev1.EngineContainer, Env: []corev1.EnvVar{{Name: "HF_TOKEN", Value: "secret"}}}},
		}}
	})
	text, err := json.Marshal(routerDeployment(moed, "semmoe:1", "uid", "PEM"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), `"registry"`) || strings.Contains(string(text), "HF_TOKEN") {
		t.Errorf("%s", text)
	}
}

// The disruption budget and the routers select all pods of a group; Services select only the serving pods.
func TestGroupSelectors(t *testing.T) {
	moed := moedtest.Deployment(moedtest.TwoPods)
	budget, err := metav1.LabelSelectorAsSelector(&metav1.LabelSelector{
		MatchLabels: engineBudget(moed).Spec.Selector.MatchLabels,
		MatchExpressions: []metav1.LabelSelectorRequirement{{
			Key: semmoev1.LabelComponent, Operator: *engineBudget(moed).Spec.Selector.MatchExpressions[0].Operator, Values: engineBudget(moed).Spec.Selector.MatchExpressions[0].Values,
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := "semmoe.io/component in (engine,worker),semmoe.io/deployment=m"; budget.String() != want {
		t.Errorf("the budget selects %s, want %s", budget, want)
	}
	if want := "--selector=semmoe.io/deployment=m,semmoe.io/component in (engine,worker)"; !slices.Contains(routerArgs(moed), want) {
		t.Errorf("the router's arguments are %v, want %s", routerArgs(moed), want)
	}
	for _, budget := range []*policyac.PodDisruptionBudgetApplyConfiguration{engineBudget(moed), routerBudget(moed)} {
		if *budget.Spec.UnhealthyPodEvictionPolicy != policyv1.AlwaysAllow {
			t.Errorf("pods of %s that do not serve hold up the drain of their nodes", *budget.Name)
		}
	}
	// Replicas with another number of pods serve until they are replaced.
	one := moedtest.Deployment()
	if diff := cmp.Diff(engineBudget(one), engineBudget(moed)); diff != "" {
		t.Errorf("budget (-one +two):\n%s", diff)
	}
	if diff := cmp.Diff(routerArgs(one), routerArgs(moed)); diff != "" {
		t.Errorf("router (-one +two):\n%s", diff)
	}
	if diff := cmp.Diff(podsService(one), podsService(moed)); diff != "" {
		t.Errorf("Service of the pods (-one +two):\n%s", diff)
	}
}
