package moedeployment

import (
	"slices"
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// What an engine cannot do is refused at once, what its model cannot as soon as that is known; what it can is a flag of its own.
func TestOverlap(t *testing.T) {
	halves := func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"}
		m.Spec.Engine.Overlap = &semmoev1.OverlapSpec{MicroBatches: 2}
	}
	moed := moedtest.Deployment(halves)
	if err := validate(moed); err != nil {
		t.Fatal(err)
	}
	if err := validateModel(moed, moedtest.Report()); err != nil {
		t.Errorf("a model that can: %v", err)
	}
	workload, err := render(moed, "r1", moedtest.Report(), nil, own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	if args := workload.template().Spec.Containers[0].Args; !slices.Contains(args, "--enable-two-batch-overlap") {
		t.Errorf("the engine's arguments are %v", args)
	}
	mixtral := moedtest.Report()
	mixtral.Family = "mixtral"
	if err := validateModel(moed, mixtral); err == nil || err.reason != "OverlapUnsupported" || !strings.HasPrefix(err.message, "spec.engine.overlap.microBatches: ") {
		t.Errorf("a model that cannot: %v", err)
	}
	if err := validate(moedtest.Deployment(halves, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Type = semmoev1.EngineVLLMAscend })); err == nil || err.reason != "OverlapUnsupported" {
		t.Errorf("an engine that cannot: %v", err)
	}
	if err := validate(moedtest.Deployment(halves, func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--enable-two-batch-overlap")
	})); err == nil || err.reason != "ContradictingFlags" {
		t.Errorf("a flag of the user's beside it: %v", err)
	}
	indivisible := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.ExpertParallelSize = 5 })
	if err := validateModel(indivisible, moedtest.Report()); err == nil || err.reason != "InvalidExpertParallelSize" {
		t.Errorf("a size that does not divide the experts: %v", err)
	}
}
