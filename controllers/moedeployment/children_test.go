package moedeployment

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// What the spec leaves open does not stand in the arguments: an upgrade of the operator must not restart routers because
// it has learned another flag.
func TestRouterArgs(t *testing.T) {
	always := []string{
		"router", "--namespace=ns", "--selector=semmoe.io/component=engine,semmoe.io/deployment=m", "--engine=SGLang", "--sample-percent=0",
		"--host=$(POD_IP)", "--drain-timeout=300s",
	}
	cases := map[string]struct {
		routing semmoev1.RoutingSpec
		more    []string
		ports   []string
	}{
		"as it comes":     {semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter}, nil, []string{"http 8000", "metrics 9090"}},
		"endpoint picker": {semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeEndpointPicker}, []string{"--endpoint-picker"}, []string{"ext-proc 9002", "health 9003", "metrics 9090"}},
		"weights": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, Weights: &semmoev1.RoutingWeights{AffinityPercent: ptr.To[int32](0), PrefixPercent: ptr.To[int32](105)}},
			[]string{"--weights=affinity=0,prefix=1.05,load=1"}, []string{"http 8000", "metrics 9090"},
		},
		"prompts that wait": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, Weights: &semmoev1.RoutingWeights{WaitPercent: ptr.To[int32](50)}},
			[]string{"--weights=affinity=1,prefix=1,load=1,wait=0.5"}, []string{"http 8000", "metrics 9090"},
		},
		"limit": {
			semmoev1.RoutingSpec{Mode: semmoev1.RoutingModeRouter, PendingLimitPerRank: ptr.To[int32](32)},
			[]string{"--pending-limit-per-rank=32"}, []string{"http 8000", "metrics 9090"},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed := deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing = tc.routing })
			pod := routerDeployment(moed, "semmoe:1", "uid").Spec.Template.Spec
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
			if grace, drain := *pod.TerminationGracePeriodSeconds, *container.Lifecycle.PreStop.Sleep.Seconds+graceSeconds; grace <= drain {
				t.Errorf("a router is killed after %d s, while it may drain for %d s", grace, drain)
			}
		})
	}
}

// The router of a deployment that is profiled finds there whose tables to use, and starts where nothing says so yet.
func TestRouterTables(t *testing.T) {
	of := func(profiling *semmoev1.ProfilingSpec) *coreac.PodSpecApplyConfiguration {
		return routerDeployment(deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = profiling }), "semmoe:1", "uid").Spec.Template.Spec
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

// A Service that leads to the engines goes over to the routers as soon as one of the present template is available.
func TestUpdatedAvailable(t *testing.T) {
	cases := map[string]struct {
		generation                   int64 // observed
		replicas, updated, available int32
		want                         bool
	}{
		"all of them":                    {2, 3, 3, 3, true},
		"not observed yet":               {1, 3, 3, 3, false},
		"the first of them":              {2, 3, 3, 1, true},
		"none yet":                       {2, 3, 3, 0, false},
		"one, beside the old ones":       {2, 4, 1, 4, true},
		"one that starts, and old ones":  {2, 4, 1, 3, false},
		"some of either, by the numbers": {2, 4, 2, 3, true},
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

// Sequences are kept where somebody asks for them, and nowhere else: they are prompts.
func TestRouterKeepsSequencesOnDemand(t *testing.T) {
	for samples, want := range map[semmoev1.LiveSamples]bool{semmoev1.LiveSamplesCounts: false, semmoev1.LiveSamplesSequences: true, "": false} {
		args := routerArgs(deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = &semmoev1.ProfilingSpec{LiveSamples: samples} }))
		if got := slices.Contains(args, "--live-samples=sequences"); got != want {
			t.Errorf("liveSamples %q: arguments %v", samples, args)
		}
	}
}
