// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/test/corpus"
	"github.com/semmoe/operator/test/load"
)

//go:embed drifting.yaml
var secondManifest string

const (
	// secondDeployment is the MoEDeployment of the second act.
	secondDeployment = "drifting"
	// fromScratch is the name of a profile of code and of its plan, scrambledName the name of a profile with renumbered
	// experts and of its plan.
	fromScratch   = "from-scratch"
	scrambledName = "scrambled"
	// proseDataset and codeDataset are names of ConfigMaps.
	proseDataset = "prose"
	codeDataset  = "code"
	// badSoak is the canary time of the bad plan on an idle machine. A pinned plan counts as approved: it is promoted
	// after its canary time if too few requests arrived for a comparison, as on a busy machine. The operator rolls a
	// worse plan back as soon as the comparison shows it, so a long canary time does not prolong the demo.
	badSoak = 100 * time.Second
)

// secondAct changes the traffic of a model that serves under a plan. The operator must detect the change, re-plan from
// sampled requests, and roll the new plan out. Then the act pins a bad plan, which the operator must roll back.
func (d *demo) secondAct(ctx context.Context, texts texts) ([]check, error) {
	s := &shift{demo: d, golden: texts.golden, prose: ofProse(slices.Concat(texts.train, texts.heldOut), true),
		code: ofProse(texts.train, false), heldOut: ofProse(texts.heldOut, false)}
	for _, part := range []func(context.Context) error{s.serveProse, s.change, s.replan, s.compareWithScratch, s.tryBadPlan} {
		if err := part(ctx); err != nil {
			return nil, err
		}
	}
	events, err := d.timeline(ctx)
	if err != nil {
		return nil, err
	}
	printTimeline(os.Stdout, events)
	checks := s.checks()
	s.print(os.Stdout)
	printChecks(os.Stdout, checks)
	return checks, nil
}

// shift is the state and the result of the second act.
type shift struct {
	*demo
	golden []goldenCase
	// prose is the traffic that the first plan is solved for. code is the traffic after the change, which the operator
	// samples. heldOut is code from other documents.
	prose, code, heldOut []corpus.Request
	// base is the plan for prose, again the operator's new plan after the change, scratch a plan from a profile of code
	// only, and bad a plan from a profile of code with renumbered experts.
	base, again, scratch, bad *semmoev1.PlacementPlan
	// usual measures prose under base, shifted measures code under base. replanned, planned and kept measure held-out
	// code under again, under scratch, and under scratch after the rollback of bad.
	usual, shifted, replanned, planned, kept *measurement
	detection                                detection
	// reported is the time from the change to the operator's report of drift, recovered the time from the change to the
	// end of the new plan's rollout. drift and why are the reported status and message.
	reported, recovered time.Duration
	drift               semmoev1.DriftStatus
	why                 string
	// jobs are the numbers of profiling Jobs before the change and after the rollout of the operator's new plan.
	jobs [2]int
	// failure is the reason why bad was rolled back. ready is true if the deployment was ready at every poll until
	// then.
	failure string
	ready   bool
	answers []answer
}

// serveProse serves the model under a plan from a profile of prose only.
func (s *shift) serveProse(ctx context.Context) error {
	if err := s.applyDataset(ctx, proseDataset, s.prose); err != nil {
		return err
	}
	if err := s.serve(ctx, "drifting.yaml", secondManifest); err != nil {
		return err
	}
	return s.during(ctx, s.prose, func() error {
		if err := s.out.Step(ctx, "plan for prose rolled out", s.waitCondition(ctx, semmoev1.ConditionRolledOut, s.profileProgress)); err != nil {
			return err
		}
		moed, err := s.get(ctx)
		if err != nil {
			return err
		}
		s.base = &semmoev1.PlacementPlan{}
		if err := s.read(ctx, s.base, "pplan", moed.Status.Plan); err != nil {
			return err
		}
		return s.out.Step(ctx, "plan in the request routers", s.waitUsed(ctx, s.base))
	})
}

// change measures prose, then sends code until the operator reports drift.
func (s *shift) change(ctx context.Context) (err error) {
	if s.usual, err = s.measured(ctx, "prose under the plan for prose", s.prose); err != nil {
		return err
	}
	calibration, err := s.calibration(ctx, s.base)
	if err != nil {
		return err
	}
	before, err := s.sampledUnder(ctx, s.base.Status.PlanDigest)
	if err != nil {
		return err
	}
	changed, err := lastSample(before)
	if err != nil {
		return err
	}
	if s.jobs[0], err = s.profilingJobs(ctx); err != nil {
		return err
	}
	begin := time.Now()
	if s.shifted, err = s.measured(ctx, "code under the plan for prose", s.code); err != nil {
		return err
	}
	samples, err := s.sampledUnder(ctx, s.base.Status.PlanDigest)
	if err != nil {
		return err
	}
	s.detection = detect(calibration, samples, changed)
	err = s.during(ctx, s.code, func() error {
		return s.out.Step(ctx, "drift reported by the operator", s.waitDrift(ctx))
	})
	s.reported = time.Since(begin)
	return err
}

// replan waits until the operator has rolled out a new plan from sampled requests, and measures that plan.
func (s *shift) replan(ctx context.Context) error {
	begin := time.Now()
	if err := s.during(ctx, s.code, func() error {
		if err := s.out.Step(ctx, "plan made from sampled traffic", s.waitReplan(ctx)); err != nil {
			return err
		}
		return s.rolledOut(ctx, "new plan", s.again)
	}); err != nil {
		return err
	}
	s.recovered = s.reported + time.Since(begin)
	var err error
	if s.jobs[1], err = s.profilingJobs(ctx); err != nil {
		return err
	}
	s.replanned, err = s.measured(ctx, "code under the new plan", s.heldOut)
	return err
}

// compareWithScratch profiles code separately, solves a plan from scratch, pins that plan, and measures it.
func (s *shift) compareWithScratch(ctx context.Context) error {
	if err := s.applyDataset(ctx, codeDataset, s.code); err != nil {
		return err
	}
	moed, err := s.get(ctx)
	if err != nil {
		return err
	}
	if err := s.during(ctx, s.code, func() (err error) {
		if s.scratch, err = s.plan(ctx, "plan from scratch", s.profileOf(moed, fromScratch, moed.Spec.Profiling.SamplingSpec)); err != nil {
			return err
		}
		// A canary time of 0 skips the comparison, which would roll back a plan that is no better than the current one.
		if err := s.pin(ctx, s.scratch, 0); err != nil {
			return err
		}
		return s.rolledOut(ctx, "plan from scratch", s.scratch)
	}); err != nil {
		return err
	}
	s.planned, err = s.measured(ctx, "code under the plan from scratch", s.heldOut)
	return err
}

// tryBadPlan pins a plan from a profile with renumbered experts, and waits until the operator has rolled it back.
func (s *shift) tryBadPlan(ctx context.Context) error {
	moed, err := s.get(ctx)
	if err != nil {
		return err
	}
	if err := s.during(ctx, s.code, func() error {
		var sampling profile.Sampling
		if err := s.out.Step(ctx, "profile with scrambled experts", func(func(string)) (err error) {
			from := &semmoev1.AffinityProfile{}
			if err := s.read(ctx, from, "aprof", fromScratch); err != nil {
				return err
			}
			sampling, err = s.publishScrambled(ctx, from)
			return err
		}); err != nil {
			return err
		}
		if s.bad, err = s.plan(ctx, "bad plan", s.profileOf(moed, scrambledName, semmoev1.SamplingSpec{
			Requests: int32(sampling.Requests), Tokens: int32(sampling.Tokens), RequestTokens: int32(sampling.RequestTokens),
		})); err != nil {
			return err
		}
		if err := s.pin(ctx, s.bad, int32(load.Scale(badSoak).Seconds())); err != nil {
			return err
		}
		return s.out.Step(ctx, "bad plan taken back", s.waitRolledBack(ctx))
	}); err != nil {
		return err
	}
	if s.kept, err = s.measured(ctx, "code under the remaining plan", s.heldOut); err != nil {
		return err
	}
	s.answers, err = s.ask(ctx, s.golden)
	return err
}

// measured runs measure as a step.
func (s *shift) measured(ctx context.Context, what string, requests []corpus.Request) (m *measurement, err error) {
	err = s.out.Step(ctx, what, func(update func(string)) error {
		m, err = s.measure(ctx, requests, update)
		return err
	})
	return m, err
}

// rolledOut waits until a plan is rolled out and the request routers use its tables.
func (s *shift) rolledOut(ctx context.Context, what string, plan *semmoev1.PlacementPlan) error {
	if err := s.out.Step(ctx, what+" rolled out", s.waitInService(ctx, plan)); err != nil {
		return err
	}
	return s.out.Step(ctx, "its tables in the request routers", s.waitUsed(ctx, plan))
}

// profileOf returns an AffinityProfile of code that is sampled from the running deployment.
func (s *shift) profileOf(moed *semmoev1.MoEDeployment, name string, sampling semmoev1.SamplingSpec) *semmoev1.AffinityProfile {
	return &semmoev1.AffinityProfile{
		TypeMeta:   metav1.TypeMeta{APIVersion: semmoev1.GroupVersion.String(), Kind: "AffinityProfile"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: semmoev1.AffinityProfileSpec{
			Model: moed.Spec.Model, Engine: moed.Spec.Engine, Parallelism: moed.Spec.Parallelism,
			Dataset:      &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: codeDataset}},
			SamplingSpec: sampling, Target: semmoev1.ProfilingTargetServing,
			DeploymentRef: &semmoev1.DeploymentReference{Name: moed.Name},
		},
	}
}

// plan creates a profile, and a plan from the profile with the same name, and waits until both are complete.
func (s *shift) plan(ctx context.Context, what string, profile *semmoev1.AffinityProfile) (*semmoev1.PlacementPlan, error) {
	plan := &semmoev1.PlacementPlan{
		TypeMeta:   metav1.TypeMeta{APIVersion: semmoev1.GroupVersion.String(), Kind: "PlacementPlan"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: profile.Name},
		Spec: semmoev1.PlacementPlanSpec{
			ProfileRef: semmoev1.ProfileReference{Name: profile.Name}, Attention: profile.Spec.Parallelism.Attention,
			ExpertParallelSize: profile.Spec.Parallelism.ExpertParallelSize, Engine: profile.Spec.Engine.Type,
		},
	}
	return plan, s.out.Step(ctx, what+" made", func(update func(string)) error {
		if err := s.apply(ctx, profile, plan); err != nil {
			return err
		}
		return poll(ctx, update, func(ctx context.Context) (string, bool, error) {
			if err := s.read(ctx, plan, "pplan", plan.Name); err != nil {
				return "", false, err
			}
			ready := meta.FindStatusCondition(plan.Status.Conditions, semmoev1.ConditionReady)
			if ready == nil {
				return "no condition yet", false, nil
			}
			return ready.Message, ready.Status == metav1.ConditionTrue, nil
		})
	})
}

// pin sets spec.placement.planRef to the plan, and the canary time to soakSeconds.
func (s *shift) pin(ctx context.Context, plan *semmoev1.PlacementPlan, soakSeconds int32) error {
	return s.out.Step(ctx, fmt.Sprintf("spec.placement.planRef: %s", plan.Name), func(func(string)) error {
		_, err := s.cluster.run(ctx, nil, "patch", "moed", "-n", namespace, s.name, "--type=merge", "-p",
			fmt.Sprintf(`{"spec":{"placement":{"planRef":{"name":%q}},"rollout":{"soakSeconds":%d}}}`, plan.Name, soakSeconds))
		return err
	})
}

// profilingJobs counts the profiling Jobs in the namespace.
func (s *shift) profilingJobs(ctx context.Context) (int, error) {
	names, err := s.cluster.run(ctx, nil, "get", "jobs", "-n", namespace, "-l", semmoev1.LabelComponent+"="+semmoev1.ComponentProfile, "-o", "name")
	return len(strings.Fields(names)), err
}
