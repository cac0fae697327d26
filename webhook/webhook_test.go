// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	admissionac "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/poll"
)

// TestRefusals checks that a rejection names the field and the allowed values.
func TestRefusals(t *testing.T) {
	plan := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "of-eight"}}
	plan.Spec.ProfileRef.Name, plan.Spec.ExpertParallelSize = "any", 8
	create(t, plan)
	create(t, deployment("taken"))
	withDataset := &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		Containers: []corev1.Container{}, Volumes: []corev1.Volume{{Name: "dataset", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
	}}
	cases := map[string]struct {
		change func(*semmoev1.MoEDeployment)
		want   string
	}{
		"reserved flag": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--ep-size=7"} }, "--ep-size"},
		"reserved label": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"semmoe.io/revision": "x"}}}
		}, "spec.template.metadata.labels"},
		"map for an engine without one": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Placement.Realization = semmoev1.EngineVLLM, semmoev1.RealizationEngineMap
		}, "spec.placement.realization: VLLM reads no expert map"},
		"adapters next to a permuted checkpoint": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.PlanRef, m.Spec.Engine.Args = &semmoev1.PlanReference{Name: "p"}, []string{"--lora-paths", "a=/adapters/a"}
			m.Spec.Placement.Realization = semmoev1.RealizationReshuffledWeights
		}, `spec.engine.args: "--lora-paths" is invalid with ReshuffledWeights`},
		"adapters of an engine without a map": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "p"}
			m.Spec.Engine.Type, m.Spec.Engine.Args = semmoev1.EngineVLLM, []string{"--enable-lora"}
		}, `spec.engine.args: "--enable-lora" is invalid with ReshuffledWeights`},
		"micro-batches of an engine without": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Engine.Overlap = semmoev1.EngineTensorRTLLM, &semmoev1.OverlapSpec{MicroBatches: 2}
		}, "spec.engine.overlap: TensorRTLLM has no flag for it"},
		"chosen micro-batches without an exchange": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "p"}
			m.Spec.Engine.Args, m.Spec.Engine.Overlap = nil, &semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}
		}, "spec.engine.overlap: without an all-to-all backend there is no exchange to overlap"},
		"unknown layout": {func(m *semmoev1.MoEDeployment) { m.Spec.Model.LayoutAs = "qwen9" }, `spec.model.layoutAs: "qwen9" is invalid: it must be a model type of the table`},
		"plan where there is no all-to-all": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Parallelism.Attention = semmoev1.EngineVLLM, semmoev1.AttentionTensorParallel
			m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "p"}}
		}, "spec.parallelism.attention: with TensorParallel, every rank of VLLM has every token"},
		"plan of another shape": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "of-eight"}
		}, "spec.placement.planRef: PlacementPlan of-eight is for attention DataParallel on 8 ranks"},
		"an administrative route": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.PassThrough = []string{"/v1/custom", "/v1/load_lora_adapter"}
		}, `spec.routing.passThrough: "/v1/load_lora_adapter" is invalid: /v1/load_lora_adapter is an administrative route of an engine, which clients must not reach`},
		"unknown hardware": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Placement.Hardware = &semmoev1.HardwareReference{BuiltIn: "abacus"}
		}, "spec.placement.hardware.builtIn: there is no built-in hardware profile \"abacus\"; there are h200-nvlink"},
		"rejected profile": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, Target: semmoev1.ProfilingTargetDedicated, Template: withDataset}
		}, "spec.profiling: the resulting AffinityProfile would be rejected: spec.template.spec.volumes"},
		"profile rejected for an inherited field": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Template = withDataset
			m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/d"}, Target: semmoev1.ProfilingTargetDedicated}
		}, "set spec.profiling.template, which replaces spec.template in the profile and restarts no pod"},
		"release without routed experts": {func(m *semmoev1.MoEDeployment) {
			profiled(m)
			m.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: "vllm/vllm-openai:v0.17.0"}
		}, "spec.engine.image: VLLM 0.17.0 is invalid with spec.profiling.dataset and spec.routing.samplePercent: returning routed experts needs 0.22.0 or newer"},
		"connector and sampling": {func(m *semmoev1.MoEDeployment) {
			profiled(m)
			m.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: "vllm/vllm-openai:v0.22.0", Args: []string{"--kv-transfer-config", `{"kv_connector":"LMCacheConnectorV1"}`}}
		}, "spec.engine.args: the KV connector LMCacheConnectorV1 is invalid with --enable-return-routed-experts"},
		"copies without all-to-all": {func(m *semmoev1.MoEDeployment) {
			profiled(m)
			m.Spec.Engine.Args, m.Spec.Placement.RedundantExperts = nil, ptr.To(intstr.FromInt32(4))
		}, "spec.placement.redundantExperts: 4 is invalid: spec.placement.redundantExperts needs an all-to-all backend"},
		"copies that are chosen, without all-to-all": {func(m *semmoev1.MoEDeployment) {
			profiled(m)
			m.Spec.Engine.Args, m.Spec.Placement.RedundantExperts = nil, ptr.To(intstr.FromString("Auto"))
			m.Spec.Placement.RedundantMemoryBytes = ptr.To(resource.MustParse("8Gi"))
		}, "spec.placement.redundantExperts: Auto is invalid: spec.placement.redundantExperts needs an all-to-all backend"},
		"map that is known to be wrong": {func(m *semmoev1.MoEDeployment) {
			profiled(m)
			m.Spec.Engine.Image, m.Spec.Engine.Args, m.Spec.Placement.Realization = "lmsysorg/sglang:v0.5.17", nil, semmoev1.RealizationEngineMap
		}, "spec.placement.realization: EngineMap is invalid: SGLang before 0.5.23 loads the experts of models by the map and selects experts without it"},
		"options of an engine without": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Options = "a: 1" }, "spec.engine.options is invalid: SGLang has no options file"},
		"options file in the image": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Engine.Args = semmoev1.EngineTensorRTLLM, []string{"--extra_llm_api_options", "/x.yaml"}
		}, "move its content to spec.engine.options"},
		"name of another's child":       {func(m *semmoev1.MoEDeployment) { m.Name = "taken-pods" }, `an object called "taken-pods"`},
		"name whose child is another's": {func(m *semmoev1.MoEDeployment) { m.Name = "taken-router" }, `an object called "taken-router"`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			refused := func() error {
				moed := deployment("refused")
				tc.change(moed)
				return api.Create(t.Context(), moed, client.DryRunAll)
			}
			// The cache of the manager observes the other objects asynchronously.
			poll.Until(t, "a refusal with "+tc.want, func() bool { err := refused(); return err != nil && strings.Contains(err.Error(), tc.want) })
		})
	}
	if err := api.Create(t.Context(), deployment("accepted"), client.DryRunAll); err != nil {
		t.Error(err)
	}
	unbuilt := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "unbuilt"}}
	unbuilt.Spec.ProfileRef.Name, unbuilt.Spec.ExpertParallelSize, unbuilt.Spec.Hardware = "any", 8, &semmoev1.HardwareReference{BuiltIn: "abacus"}
	if err := api.Create(t.Context(), unbuilt, client.DryRunAll); err == nil || !strings.Contains(err.Error(), "spec.hardware.builtIn") {
		t.Errorf("plan for unknown hardware: error = %v", err)
	}
	profile := &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
	profile.Spec.Model, profile.Spec.Engine, profile.Spec.Parallelism = deployment("x").Spec.Model, deployment("x").Spec.Engine, deployment("x").Spec.Parallelism
	profile.Spec.Engine.Type = semmoev1.EngineTensorRTLLM
	profile.Spec.Target = semmoev1.ProfilingTargetDedicated
	profile.Spec.Dataset = &semmoev1.DatasetSpec{Path: "/models/data.jsonl"}
	if err := api.Create(t.Context(), profile, client.DryRunAll); err == nil || !strings.Contains(err.Error(), "cannot profile") {
		t.Errorf("engine that cannot profile: error = %v", err)
	}
}

// profiled requests a plan.
func profiled(m *semmoev1.MoEDeployment) {
	m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/data.jsonl"}}
}

// TestReleasesOfStoredObjects checks stored objects whose engine this release of the operator rejects. They can still
// be changed, with a warning, and a newer image or a backend fixes them.
func TestReleasesOfStoredObjects(t *testing.T) {
	for name, change := range map[string]func(*semmoev1.MoEDeployment){
		"old-release": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: "vllm/vllm-openai:v0.17.0", Args: []string{"--all2all-backend", "deepep_low_latency"}}
		},
		"connector": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: "vllm/vllm-openai:v0.22.0", Args: []string{"--kv-offloading-size=64"}}
		},
		"wrong-map": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Image, m.Spec.Engine.Args, m.Spec.Placement.Realization = "lmsysorg/sglang:v0.5.17", nil, semmoev1.RealizationEngineMap
		},
		"copies": func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Args, m.Spec.Placement.RedundantExperts = nil, ptr.To(intstr.FromInt32(4))
		},
	} {
		old := deployment(name)
		old.Spec.Engine.Type, old.Spec.Parallelism.Attention, old.Spec.Routing.Mode = semmoev1.EngineSGLang, semmoev1.AttentionDataParallel, semmoev1.RoutingModeRouter // the defaults
		profiled(old)
		change(old)
		rules := validator[*semmoev1.MoEDeployment]{&moeDeployments{Reader: api}}
		if _, err := rules.ValidateCreate(t.Context(), old); err == nil {
			t.Errorf("%s is accepted, want a rejection", name)
		}
		scaled := old.DeepCopy()
		scaled.Spec.Replicas = ptr.To[int32](3)
		warnings, err := rules.ValidateUpdate(t.Context(), old, scaled)
		if err != nil || !mentions(warnings, "still invalid: ") {
			t.Errorf("%s, scaled: warnings %q, error %v", name, warnings, err)
		}
		fixed := scaled.DeepCopy()
		if fixed.Spec.Engine.Type == semmoev1.EngineVLLM {
			fixed.Spec.Engine.Image = "vllm/vllm-openai:v0.32.0"
		} else {
			fixed.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"}
		}
		if warnings, err := rules.ValidateUpdate(t.Context(), scaled, fixed); err != nil || mentions(warnings, "still invalid: ") {
			t.Errorf("%s, fixed: warnings %q, error %v", name, warnings, err)
		}
	}
}

// TestFaultsAreFixedOneByOne checks that an update may fix one of several stored errors, with a warning for each other
// error, and must not add an error.
func TestFaultsAreFixedOneByOne(t *testing.T) {
	type change func(*semmoev1.MoEDeployment)
	with := func(changes ...change) *semmoev1.MoEDeployment {
		m := deployment("faults")
		m.Spec.Engine.Type, m.Spec.Parallelism.Attention, m.Spec.Routing.Mode = semmoev1.EngineSGLang, semmoev1.AttentionDataParallel, semmoev1.RoutingModeRouter // the defaults
		for _, change := range changes {
			change(m)
		}
		return m
	}
	hardware := func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.Hardware = &semmoev1.HardwareReference{BuiltIn: "abacus"}
	}
	flags := func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--ep-size", "8"} }
	policy := func(m *semmoev1.MoEDeployment) {
		m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever}}
	}
	rules := validator[*semmoev1.MoEDeployment]{&moeDeployments{Reader: api}}
	for name, test := range map[string]struct {
		old, object *semmoev1.MoEDeployment
		refused     string
		still       []string // parts of the warnings of faults; all of them
	}{
		"the first is fixed":   {with(hardware, flags, policy), with(hardware, policy), "", []string{"spec.placement.hardware", "restartPolicy"}},
		"the last is fixed":    {with(hardware, flags, policy), with(hardware, flags), "", []string{"spec.placement.hardware", "--ep-size"}},
		"all are fixed":        {with(hardware, flags, policy), with(), "", nil},
		"one is added":         {with(hardware), with(hardware, policy), "restartPolicy", nil},
		"another in its place": {with(flags), with(policy), "restartPolicy", nil},
	} {
		warnings, err := rules.ValidateUpdate(t.Context(), test.old, test.object)
		if (err == nil) != (test.refused == "") || err != nil && !strings.Contains(err.Error(), test.refused) {
			t.Errorf("%s: error %v, want %q", name, err, test.refused)
		}
		still := slices.DeleteFunc(slices.Clone([]string(warnings)), func(warning string) bool { return !strings.HasPrefix(warning, "still invalid: ") })
		if len(still) != len(test.still) {
			t.Errorf("%s: warnings about errors = %q, want %q", name, still, test.still)
		}
		for _, part := range test.still {
			if !mentions(still, part) {
				t.Errorf("%s: warnings about errors = %q, want %q", name, still, part)
			}
		}
	}
}

// TestWarnings checks that each risky setting causes a warning, and that other settings cause none.
func TestWarnings(t *testing.T) {
	profiling := func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/data.jsonl"}}
	}
	cases := map[string]struct {
		change func(*semmoev1.MoEDeployment)
		want   []string // parts of the warnings; all of them
	}{
		"planned":             {profiling, nil},
		"no plan":             {func(*semmoev1.MoEDeployment) {}, []string{"spec.profiling: is not set, nor is spec.placement.planRef: no plan is made, and the model is served with the engine's default placement; set spec.profiling.dataset, to {ownText: {}} if you have no data set"}},
		"image without a tag": {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Engine.Image = "registry.example:5000/engine" }, []string{"spec.engine.image"}},
		"image latest":        {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Engine.Image = "engine:latest" }, []string{"spec.engine.image"}},
		"image by digest": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Image = "engine@sha256:" + strings.Repeat("0", 64)
		}, nil},
		"no soak":              {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Rollout.SoakSeconds = ptr.To[int32](0) }, []string{"spec.rollout.soakSeconds"}},
		"no soak, and no plan": {func(m *semmoev1.MoEDeployment) { m.Spec.Rollout.SoakSeconds = ptr.To[int32](0) }, []string{"spec.profiling: is not set"}},
		"compared, with one replica": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Rollout.Compare, m.Spec.Replicas = semmoev1.CompareAll, ptr.To[int32](1)
		}, []string{"spec.rollout.compare: All has no effect with one replica"}},
		"compared, with two replicas": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Rollout.Compare, m.Spec.Replicas = semmoev1.CompareAll, ptr.To[int32](2)
		}, nil},
		"compared, without a soak": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Rollout.Compare, m.Spec.Replicas, m.Spec.Rollout.SoakSeconds = semmoev1.CompareAll, ptr.To[int32](2), ptr.To[int32](0)
		}, []string{"spec.rollout.compare: All compares nothing", "spec.rollout.soakSeconds"}},
		"rollback by hand": {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Rollout.Rollback = semmoev1.RollbackManual }, []string{"spec.rollout.rollback"}},
		"no routing":       {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Routing.Mode = semmoev1.RoutingModeNone }, []string{"spec.routing.mode"}},
		"no samples":       {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Routing.SamplePercent = ptr.To[int32](0) }, []string{"spec.routing.samplePercent"}},
		"one rank":         {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Parallelism.ExpertParallelSize = 1 }, []string{"UnsupportedByEngine: No plan can reach the engine. spec.parallelism.expertParallelSize is 1"}},
		"no all-to-all": {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Engine.Args = nil }, []string{
			"NoAllToAll: spec.engine.args has no --moe-a2a-backend", "UnprovenMap: The release of SGLang is unknown until a pod reports it. SGLang before 0.5.23 loads the experts of models by the map",
		}},
		"all-to-all that is none, and a pin": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Args, m.Spec.Placement.PlanRef = []string{"--moe-a2a-backend=none"}, &semmoev1.PlanReference{Name: "no-plan"}
		}, []string{"NoAllToAll: spec.engine.args sets --moe-a2a-backend none", "UnprovenMap: ", "spec.placement.planRef.name"}},
		"no all-to-all, attention TP": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Args, m.Spec.Parallelism.Attention = nil, semmoev1.AttentionTensorParallel
		}, []string{"UnsupportedByEngine: No plan can reach the engine. spec.engine.args has no --moe-a2a-backend, and spec.parallelism.attention is TensorParallel"}},
		"vLLM, no all-to-all": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Type, m.Spec.Engine.Args = semmoev1.EngineVLLM, nil
		}, []string{"NoAllToAll: spec.engine.args has no --all2all-backend"}},
		"no all-to-all, known release": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Image, m.Spec.Engine.Args = "lmsysorg/sglang:v0.5.17", nil
		}, []string{"NoAllToAll: spec.engine.args has no --moe-a2a-backend"}}, // reshuffled weights are used
		"newer release": {func(m *semmoev1.MoEDeployment) { profiling(m); m.Spec.Engine.Image = "lmsysorg/sglang:v0.99.0" }, []string{"UnknownRelease: SGLang 0.99.0 is newer than"}},
		"vLLM, connector, unknown release": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: "engine:1", Args: []string{"--kv-transfer-config", `{"kv_connector":"LMCacheConnectorV1"}`}}
			m.Spec.Routing.SamplePercent = ptr.To[int32](5)
		}, []string{"CaptureUnsupported: spec.engine.args: the KV connector LMCacheConnectorV1", "spec.profiling: is not set"}},
		"vLLM, all-to-all by removed variable": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Type, m.Spec.Engine.Args, m.Spec.Engine.Env = semmoev1.EngineVLLM, nil, []corev1.EnvVar{{Name: "VLLM_ALL2ALL_BACKEND", Value: "deepep_low_latency"}}
		}, []string{"NoAllToAll: spec.engine.args has no --all2all-backend"}},
		"vLLM behind a Gateway": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Type, m.Spec.Engine.Args = semmoev1.EngineVLLM, []string{"--all2all-backend", "deepep_low_latency"}
			m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker
		}, []string{"UnsupportedByEngine: No plan can reach the engine. Reshuffled weights need spec.routing.mode Router"}},
		"flag that a plan decides": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--ep-dispatch-algorithm", "dynamic")
			m.Spec.Placement.RedundantExperts = ptr.To(intstr.FromInt32(4))
		}, []string{"UnsupportedByEngine: No plan can reach the engine. "}},
		"engine without ranks for requests": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "no-profile"}}
			m.Spec.Engine.Type, m.Spec.Engine.Args = semmoev1.EngineTensorRTLLM, nil
		}, []string{"RankPinningUnsupported: ", "spec.profiling.profileRef.name"}},
		"recorder": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--enable-expert-distribution-metrics")
		}, []string{"RecorderNeedsDeepEPMode: "}},
		"sequences": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Profiling.LiveSamples = semmoev1.LiveSamplesSequences
		}, []string{"spec.profiling.liveSamples"}},
		"token in clear": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Drift = semmoev1.DriftSpec{Source: semmoev1.DriftSourcePrometheus, Prometheus: &semmoev1.PrometheusSource{Address: "http://prometheus.default.svc", Query: "x", AuthSecret: "s"}}
		}, []string{"spec.drift.prometheus"}},
		"allowed Prometheus": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Drift = semmoev1.DriftSpec{Source: semmoev1.DriftSourcePrometheus, Prometheus: &semmoev1.PrometheusSource{Address: "https://prometheus.monitoring.svc:9090", Query: "x"}}
		}, nil},
		"Prometheus that is not allowed": {func(m *semmoev1.MoEDeployment) {
			profiling(m)
			m.Spec.Drift = semmoev1.DriftSpec{Source: semmoev1.DriftSourcePrometheus, Prometheus: &semmoev1.PrometheusSource{Address: "https://prometheus.other.svc", Query: "x"}}
		}, []string{"spec.drift.prometheus.address"}},
		"plan and profile that do not exist": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "no-profile"}}
			m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "no-plan"}
		}, []string{`spec.placement.planRef.name: PlacementPlan "no-plan" does not exist`, `spec.profiling.profileRef.name: AffinityProfile "no-profile" does not exist`}},
	}
	covered := map[string]bool{}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed := deployment("warned")
			tc.change(moed)
			warned.take()
			if err := api.Create(t.Context(), moed, client.DryRunAll); err != nil {
				t.Fatal(err)
			}
			got := warned.take()
			if len(got) != len(tc.want) {
				t.Errorf("warnings %q, want %q", got, tc.want)
			}
			for _, want := range tc.want {
				if !mentions(got, want) {
					t.Errorf("warnings %q, want one with %q", got, want)
				}
				covered[strings.SplitN(want, ":", 2)[0]] = true
			}
		})
	}
	for _, risk := range allRisks {
		if !covered[risk.field] {
			t.Errorf("no test case for the risky setting %s", risk.field)
		}
	}
}

// TestWarningsOfTheFamily checks that warnings depend on the family of the inspected model, until the spec names
// another model.
func TestWarningsOfTheFamily(t *testing.T) {
	moed := deployment("inspected")
	moed.Spec.Engine.Args = nil
	moed.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{Path: "/models/data.jsonl"}}
	create(t, moed)
	warningsOf := func(change func(*semmoev1.MoEDeployment)) []string {
		t.Helper()
		changed := moed.DeepCopy()
		changed.Spec.Replicas = ptr.To[int32](2)
		change(changed)
		warned.take()
		if err := api.Update(t.Context(), changed, client.DryRunAll); err != nil {
			t.Fatal(err)
		}
		return warned.take()
	}
	same := func(*semmoev1.MoEDeployment) {}
	const anyFamily, ofQwen = "the experts of models by the map", "the experts of models of type qwen3_moe by the map"
	for _, tc := range []struct{ family, want string }{{"", anyFamily}, {"qwen3_moe", ofQwen}, {"mixtral", ""}, {"qwen3_moe", ofQwen}} {
		if tc.family != "" {
			moed.Status.Model = &semmoev1.ModelStatus{Digest: "sha256:0", Family: tc.family}
			if err := api.Status().Update(t.Context(), moed); err != nil {
				t.Fatal(err)
			}
		}
		poll.Until(t, fmt.Sprintf("warnings of %q", tc.family), func() bool { // the cache of the manager is stale
			got := warningsOf(same)
			return mentions(got, "NoAllToAll: ") && mentions(got, "UnprovenMap: ") == (tc.want != "") && (tc.want == "" || mentions(got, tc.want))
		})
	}
	if got := warningsOf(func(m *semmoev1.MoEDeployment) { m.Spec.Model.Path = "/models/other" }); !mentions(got, anyFamily) {
		t.Errorf("warnings for another model: %q, want none", got)
	}
	if got := warningsOf(func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"} }); len(got) != 0 {
		t.Errorf("warnings with an all-to-all backend: %q, want none", got)
	}
}

// TestWarningsOfSamples checks that every sample is created without a warning. The sample of the reference engine has
// no plan, because that engine exchanges nothing between GPUs.
func TestWarningsOfSamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "config", "samples", "moedeployment*.yaml"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d samples, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, document := range strings.Split(string(text), "\n---\n") {
			moed := &semmoev1.MoEDeployment{}
			if err := yaml.Unmarshal([]byte(document), moed); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if moed.Kind != "MoEDeployment" {
				continue
			}
			moed.Namespace = "default"
			warned.take()
			if err := api.Create(t.Context(), moed, client.DryRunAll); err != nil {
				t.Errorf("%s: %v", file, err)
			}
			if got := warned.take(); len(got) > 0 && filepath.Base(file) != "moedeployment-reference.yaml" {
				t.Errorf("%s: warnings %q", file, got)
			}
		}
	}
}

// TestDeletionWarnings checks the warnings for the deletion of a plan or a profile in use.
func TestDeletionWarnings(t *testing.T) {
	plan := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "in-use"}}
	plan.Spec.ProfileRef.Name, plan.Spec.ExpertParallelSize = "any", 4
	create(t, plan)
	moed := deployment("user")
	moed.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "in-use"}
	create(t, moed)
	warned.take()
	poll.Until(t, "a warning that the plan is pinned", func() bool {
		if err := api.Delete(t.Context(), plan.DeepCopy(), client.DryRunAll); err != nil {
			t.Fatal(err)
		}
		return mentions(warned.take(), "MoEDeployment user pins this plan in spec.placement.planRef: existing and new pods continue to serve it")
	})
	moed.Status.Profile = "in-use-profile"
	if err := api.Status().Update(t.Context(), moed); err != nil {
		t.Fatal(err)
	}
	profile := &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "in-use-profile"}}
	profile.Spec.Model, profile.Spec.Engine, profile.Spec.Parallelism = moed.Spec.Model, moed.Spec.Engine, moed.Spec.Parallelism
	profile.Spec.Target = semmoev1.ProfilingTargetDedicated
	profile.Spec.Dataset = &semmoev1.DatasetSpec{Path: "/models/data.jsonl"}
	create(t, profile)
	poll.Until(t, "a warning that the profile is used", func() bool {
		if err := api.Delete(t.Context(), profile.DeepCopy(), client.DryRunAll); err != nil {
			t.Fatal(err)
		}
		return mentions(warned.take(), "MoEDeployment user uses this profile")
	})
}

// TestFaultsThatWereThere checks that an object that was invalid before webhooks were installed can be changed,
// labelled and deleted, and that an update must not add an error.
func TestFaultsThatWereThere(t *testing.T) {
	configuration, err := clients.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(), "semmoe", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	invalid := deployment("invalid")
	invalid.Spec.Engine.Args = []string{"--ep-size=7"}
	without := configuration.DeepCopy()
	if err := api.Delete(t.Context(), without); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "creation without webhooks", func() bool { return api.Create(t.Context(), invalid.DeepCopy()) == nil })
	again := configuration.DeepCopy()
	again.ObjectMeta = metav1.ObjectMeta{Name: configuration.Name}
	if err := api.Create(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "webhooks again", func() bool { return asked(t.Context()) })

	live := &semmoev1.MoEDeployment{}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(invalid), live); err != nil {
		t.Fatal(err)
	}
	live.Labels = map[string]string{"team": "a"}
	if err := api.Update(t.Context(), live); err != nil {
		t.Errorf("adding a label: error = %v", err)
	}
	warned.take()
	live.Spec.Replicas = ptr.To[int32](3)
	if err := api.Update(t.Context(), live); err != nil {
		t.Errorf("changing replicas: error = %v", err)
	}
	if got := warned.take(); !mentions(got, "still invalid: ") {
		t.Errorf("warnings %q", got)
	}
	worse := live.DeepCopy()
	worse.Spec.Engine.Args = []string{"--ep-size=6", "--tp-size=3"}
	if err := api.Update(t.Context(), worse); err == nil {
		t.Error("an additional error is accepted")
	}
	if err := api.Delete(t.Context(), live); err != nil {
		t.Errorf("deletion: error = %v", err)
	}
}

// TestTrustIsKept checks that a changed or deleted certificate authority, and the API server's trust in it, are
// restored, and that applying the configuration again, as GitOps tools do, does not remove the trust.
func TestTrustIsKept(t *testing.T) {
	configurations := clients.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	bundle := func() []byte {
		live, err := configurations.Get(t.Context(), "semmoe", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, hook := range live.Webhooks[1:] {
			if !slices.Equal(hook.ClientConfig.CABundle, live.Webhooks[0].ClientConfig.CABundle) {
				return nil
			}
		}
		return live.Webhooks[0].ClientConfig.CABundle
	}
	before := bundle()

	live, err := configurations.Get(t.Context(), "semmoe", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range live.Webhooks {
		live.Webhooks[i].ClientConfig.CABundle = nil
	}
	if _, err := configurations.Update(t.Context(), live, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "trust again", func() bool { return slices.Equal(bundle(), before) && asked(t.Context()) })

	if err := clients.CoreV1().Secrets(secret.Namespace).Delete(t.Context(), secret.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "trust in another authority", func() bool { now := bundle(); return len(now) > 0 && !slices.Equal(now, before) && asked(t.Context()) })

	live, err = configurations.Get(t.Context(), "semmoe", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	trusted, address := bundle(), strings.Split(*live.Webhooks[0].ClientConfig.URL, "/")[2]
	applied, err := shipped(0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range applied.Webhooks {
		applied.Webhooks[i].ClientConfig.URL = ptr.To(strings.Replace(*applied.Webhooks[i].ClientConfig.URL, "127.0.0.1:0", address, 1))
	}
	text, err := json.Marshal(applied)
	if err != nil {
		t.Fatal(err)
	}
	intent := &admissionac.ValidatingWebhookConfigurationApplyConfiguration{}
	if err := json.Unmarshal(text, intent); err != nil {
		t.Fatal(err)
	}
	// The API server sorts managedFields by time in seconds, so that an apply in a later second may change their order, and
	// with it the resource version.
	apply := func() int64 {
		synced, err := configurations.Apply(t.Context(), intent, metav1.ApplyOptions{FieldManager: "gitops", Force: true})
		if err != nil {
			t.Fatal(err)
		}
		return synced.Generation
	}
	if first, second := apply(), apply(); first != second {
		t.Errorf("applying the configuration again changes it from generation %d to %d: two field managers conflict", first, second)
	}
	if !slices.Equal(bundle(), trusted) {
		t.Error("applying the configuration again removes the trust")
	}
}

// TestManagerAway checks that all requests are accepted while no manager is running.
func TestManagerAway(t *testing.T) {
	stopServing()
	defer func() {
		var err error
		if stopServing, err = serveAt(port); err != nil {
			t.Fatal(err)
		}
	}()
	poll.Until(t, "creation that is not reviewed", func() bool { return !asked(t.Context()) })
	create(t, deployment("meanwhile"))
}

// TestModelRulesOut checks that only a spec that contradicts the inspected model is rejected. A new checkpoint may be
// another model, and errors of the stored object are accepted.
func TestModelRulesOut(t *testing.T) {
	inspected := func(name string, size int32) *semmoev1.MoEDeployment {
		moed := deployment(name)
		moed.Spec.Parallelism.ExpertParallelSize = size
		create(t, moed)
		moed.Status.Model = &semmoev1.ModelStatus{Digest: "sha256:abc", Family: "qwen3_moe", Layers: 4, MoELayers: 4, Experts: 32, ExpertsPerToken: 4}
		moed.Status.ObservedGeneration = moed.Generation
		if err := api.Status().Update(t.Context(), moed); err != nil {
			t.Fatal(err)
		}
		return moed
	}
	moed := inspected("inspected", 4)
	for name, tc := range map[string]struct {
		change func(*semmoev1.MoEDeployment)
		want   string
	}{
		"a size that does not divide":    {func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 5 }, "spec.parallelism.expertParallelSize: expert parallel size 5 does not divide the model's 32 experts; allowed sizes: 1, 2, 4, 8, 16, 32"},
		"a size that divides":            {func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 8 }, ""},
		"more copies than there is room": {func(m *semmoev1.MoEDeployment) { m.Spec.Placement.RedundantExperts = ptr.To(intstr.FromInt32(100)) }, "spec.placement.redundantExperts: 100 is invalid"},
		"another checkpoint": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Parallelism.ExpertParallelSize, m.Spec.Model.Path = 5, "/models/other"
		}, ""},
	} {
		changed := moed.DeepCopy()
		tc.change(changed)
		err := api.Update(t.Context(), changed, client.DryRunAll)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
	stored := inspected("stored-earlier", 5)
	stored.Finalizers, stored.Labels, stored.Spec.Replicas = []string{"example.com/f"}, map[string]string{"a": "b"}, ptr.To[int32](3)
	if err := api.Update(t.Context(), stored); err != nil {
		t.Fatalf("failed to change an object that was stored earlier: %v", err)
	}
	stored.Finalizers = nil
	if err := api.Update(t.Context(), stored); err != nil {
		t.Errorf("failed to remove its finalizer: %v", err)
	}
	stored.Spec.Parallelism.ExpertParallelSize = 4
	if err := api.Update(t.Context(), stored); err != nil {
		t.Errorf("failed to fix it: %v", err)
	}
}
