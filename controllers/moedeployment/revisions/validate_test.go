// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// TestKVEvents checks that KV events become a flag and a port of the engine, and that their ports must be free.
func TestKVEvents(t *testing.T) {
	on := func(port int32) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Routing.KVEvents = &semmoev1.RoutingKVEvents{Port: port} }
	}
	workload, err := Render(moedtest.Deployment(on(5557)), "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	container := workload.Template().Spec.Containers[0]
	if !slices.Contains(container.Args, "--kv-events-config") {
		t.Errorf("the engine's arguments are %v", container.Args)
	}
	if port := container.Ports[len(container.Ports)-1]; len(container.Ports) != 2 || port.Name != "kv-events" || port.ContainerPort != 5557 {
		t.Errorf("the engine's ports are %v", container.Ports)
	}
	if err := Validate(moedtest.Deployment(on(30000))); err == nil || !strings.HasPrefix(err.Message, "spec.routing.kvEvents.port: ") {
		t.Errorf("on the port for requests: %v", err)
	}
	if err := Validate(moedtest.Deployment(on(5557), func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = []string{"--kv-events-config", "{}"} })); err == nil || err.Reason != "ContradictingFlags" {
		t.Errorf("with a flag of the user: %v", err)
	}
}

// Settings that an engine does not support are rejected immediately, and those that its model does not support once the
// model is known. Supported settings become flags.
func TestOverlap(t *testing.T) {
	halves := func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"}
		m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 2}
	}
	moed := moedtest.Deployment(halves)
	if err := Validate(moed); err != nil {
		t.Fatal(err)
	}
	if err := ValidateModel(moed, moedtest.Report()); err != nil {
		t.Errorf("a model that can: %v", err)
	}
	workload, err := Render(moed, "r1", moedtest.Report(), nil, Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	if args := workload.Template().Spec.Containers[0].Args; !slices.Contains(args, "--enable-two-batch-overlap") {
		t.Errorf("the engine's arguments are %v", args)
	}
	mixtral := moedtest.Report()
	mixtral.Family = "mixtral"
	if err := ValidateModel(moed, mixtral); err == nil || err.Reason != "OverlapUnsupported" || !strings.HasPrefix(err.Message, "spec.engine.overlap.microBatches: ") {
		t.Errorf("a model that cannot: %v", err)
	}
	if err := Validate(moedtest.Deployment(halves, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = semmoev1.EngineVLLMAscend })); err == nil || err.Reason != "OverlapUnsupported" {
		t.Errorf("an engine that cannot: %v", err)
	}
	if err := Validate(moedtest.Deployment(halves, func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--enable-two-batch-overlap")
	})); err == nil || err.Reason != "ContradictingFlags" {
		t.Errorf("with an additional flag of the user: %v", err)
	}
	auto := []func(*semmoev1.MoEDeployment){halves, func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}
	}}
	chosen := func(change func(*semmoev1.MoEDeployment)) *semmoev1.MoEDeployment {
		return moedtest.Deployment(append(auto, change)...)
	}
	for name, tc := range map[string]struct {
		change  func(*semmoev1.MoEDeployment)
		reason  string
		message string
	}{
		"possible":   {func(m *semmoev1.MoEDeployment) {}, "", ""},
		"no backend": {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Args = nil }, "OverlapUnsupported", "--moe-a2a-backend"},
		"no flags":   {func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = semmoev1.EngineVLLMAscend }, "OverlapUnsupported", "no flag"},
		"vLLM, attention tp": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Engine.Args = semmoev1.EngineVLLM, []string{"--all2all-backend", "deepep_low_latency"}
			m.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel
		}, "OverlapUnsupported", "TensorParallel"},
		"a flag of the user": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--enable-two-batch-overlap")
		}, "ContradictingFlags", "--enable-two-batch-overlap"},
		"a threshold of the user": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Engine.Args = semmoev1.EngineVLLM, []string{"--all2all-backend", "deepep_low_latency", "--dbo-decode-token-threshold=8"}
		}, "ContradictingFlags", "--dbo-decode-token-threshold"},
		"DeepEP in low latency, which accepts no multiprocessors": {func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--deepep-mode", "low_latency")
		}, "", ""},
	} {
		err := Validate(chosen(tc.change))
		if (err == nil) != (tc.reason == "") || err != nil && (err.Reason != tc.reason || !strings.Contains(err.Message, tc.message)) {
			t.Errorf("mode Auto, %s: %v, want %s", name, err, tc.reason)
		}
	}
	if err := ValidateModel(chosen(func(*semmoev1.MoEDeployment) {}), mixtral); err != nil {
		t.Errorf("mode Auto and a model that cannot: %v", err)
	}
	indivisible := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 5 })
	if err := ValidateModel(indivisible, moedtest.Report()); err == nil || err.Reason != "InvalidExpertParallelSize" {
		t.Errorf("a size that does not divide the experts: %v", err)
	}
}

// Without an all-to-all backend, a spec with a plan is rejected, and a spec without one serves.
func TestPlansNeedAllToAll(t *testing.T) {
	plan := func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "p"}
		m.Spec.Routing.SamplePercent = ptr.To[int32](0)
	}
	for _, engine := range []semmoev1.EngineType{semmoev1.EngineSGLang, semmoev1.EngineVLLM, semmoev1.EngineVLLMAscend, semmoev1.EngineTensorRTLLM} {
		of := func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Parallelism.Attention = engine, semmoev1.AttentionTensorParallel
		}
		if err := Validate(moedtest.Deployment(of)); err != nil {
			t.Errorf("%s without a plan: %v", engine, err)
		}
		err := Validate(moedtest.Deployment(of, plan))
		if refused := err != nil && err.Reason == "NoAllToAll" && strings.HasPrefix(err.Message, "spec.parallelism.attention: "); refused != (engine != semmoev1.EngineSGLang) {
			t.Errorf("%s with a plan: %v", engine, err)
		}
	}
	ours := func(m *semmoev1.MoEDeployment) {
		moedtest.Shuffled(m)
		m.Spec.Engine.Env = []corev1.EnvVar{{Name: "SEMMOE_TABLES", Value: "/mine"}}
	}
	if err := Validate(moedtest.Deployment(ours)); err == nil || !strings.Contains(err.Message, "spec.engine.env: SEMMOE_TABLES") {
		t.Errorf("a variable of the operator's: %v", err)
	}
}

// A rank has at most one copy of each expert.
func TestValidateRedundantExperts(t *testing.T) {
	auto := intstr.FromString(semmoev1.RedundantExpertsAuto)
	as, alone := func(*semmoev1.MoEDeployment) {}, func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 1 }
	for _, c := range []struct {
		redundant intstr.IntOrString
		change    func(*semmoev1.MoEDeployment)
		want      string
	}{
		{intstr.FromInt32(0), as, ""},
		{intstr.FromInt32(96), as, ""},
		{intstr.FromInt32(100), as, "spec.placement.redundantExperts: 100 is invalid: 25 redundant slots per rank; 32 experts on 4 ranks allow 0 to 24"},
		{auto, as, ""},
		{auto, alone, "spec.placement.redundantExperts: Auto is invalid: 1 redundant slots per rank; 32 experts on 1 ranks allow 0 to 0"},
	} {
		moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Placement.RedundantExperts = &c.redundant }, c.change)
		got := ""
		if err := ValidateModel(moed, moedtest.Report()); err != nil {
			got = err.Message
		}
		if got != c.want {
			t.Errorf("%s redundant experts: %q, want %q", c.redundant.String(), got, c.want)
		}
	}
}
