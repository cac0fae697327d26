// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"fmt"
	"os"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/corpus"
)

//go:embed moedeployment.yaml
var firstManifest string

// firstDeployment is the MoEDeployment of the first act.
const firstDeployment = "tiny"

// minHeldOut is the minimum number of held-out requests. With fewer requests, window figures are not meaningful.
const minHeldOut = 400

// firstAct serves and profiles the model, and compares the resulting plan with the default placement.
func (d *demo) firstAct(ctx context.Context, texts texts) ([]check, error) {
	if len(texts.heldOut) < minHeldOut {
		return nil, fmt.Errorf("the corpus has %d held-out requests on this machine; at least %d are needed", len(texts.heldOut), minHeldOut)
	}
	if err := d.applyDataset(ctx, "corpus", texts.train); err != nil {
		return nil, err
	}
	if err := d.serve(ctx, "moedeployment.yaml", firstManifest); err != nil {
		return nil, err
	}
	answers, err := d.ask(ctx, texts.golden)
	if err != nil {
		return nil, err
	}
	r := &report{answers: answers, checks: checkAnswers(answers)}
	if err := d.closeLoop(ctx, texts.heldOut, r); err != nil {
		return nil, err
	}
	r.print(os.Stdout)
	return r.checks, nil
}

// closeLoop waits for the plan, measures the default placement, approves the plan, and measures the plan after its
// rollout.
func (d *demo) closeLoop(ctx context.Context, heldOut []corpus.Request, r *report) error {
	if err := d.out.Step(ctx, "model profiled", d.waitCondition(ctx, semmoev1.ConditionProfiled, d.profileProgress)); err != nil {
		return err
	}
	if err := d.out.Step(ctx, "plan solved", d.waitCondition(ctx, semmoev1.ConditionPlanned, nil)); err != nil {
		return err
	}
	if err := d.out.Step(ctx, "default placement measured", func(update func(string)) (err error) {
		r.before, err = d.measure(ctx, heldOut, update)
		return err
	}); err != nil {
		return err
	}
	if err := d.out.Step(ctx, "plan approved", func(func(string)) (err error) {
		r.forecast, err = d.approve(ctx)
		return err
	}); err != nil {
		return err
	}
	var err error
	if r.after, err = d.measurePlan(ctx, "plan", heldOut); err != nil {
		return err
	}
	moed, err := d.get(ctx)
	if err != nil {
		return err
	}
	if moed.Status.PlanDigest == "" || moed.Status.LAR == nil || moed.Status.LAR.PredictedMilli == nil {
		return fmt.Errorf("the status of the MoEDeployment has plan %q and local activation rate %+v: want a plan and a predicted rate", moed.Status.PlanDigest, moed.Status.LAR)
	}
	r.plan, r.predicted = moed.Status.PlanDigest, float64(*moed.Status.LAR.PredictedMilli)/1000
	r.checks = append(r.checks, checkPlan(r.before, r.after, r.plan, r.predicted)...)

	if r.roundRobin, err = d.measureRoundRobin(ctx, heldOut); err != nil {
		return err
	}
	r.checks = append(r.checks, checkRoundRobin(r.after, r.roundRobin)...)

	if err := d.out.Step(ctx, "reshuffled weights requested", func(func(string)) error { return d.reshuffle(ctx) }); err != nil {
		return err
	}
	if r.reshuffled, err = d.measurePlan(ctx, "reshuffled weights", heldOut); err != nil {
		return err
	}
	r.checks = append(r.checks, checkReshuffled(r.before, r.after, r.reshuffled)...)

	half, err := d.measureCapture(ctx, heldOut)
	if err != nil {
		return err
	}
	r.checks = append(r.checks, checkCapture(r.reshuffled, half)...)
	return nil
}

// measurePlan waits until the plan is rolled out and loaded by the request routers, and measures it.
func (d *demo) measurePlan(ctx context.Context, what string, heldOut []corpus.Request) (*measurement, error) {
	if err := d.out.Step(ctx, what+" rolled out", d.waitCondition(ctx, semmoev1.ConditionRolledOut, nil)); err != nil {
		return nil, err
	}
	if err := d.out.Step(ctx, "plan in the request routers", d.waitRouters(ctx)); err != nil {
		return nil, err
	}
	var measured *measurement
	return measured, d.out.Step(ctx, what+" measured", func(update func(string)) (err error) {
		if measured, err = d.measure(ctx, heldOut, update); err != nil {
			return err
		}
		moed, err := d.get(ctx)
		if err != nil {
			return err
		}
		measured.forecast, err = d.forecastRate(ctx, moed.Status.Revision)
		return err
	})
}

// reshuffle changes the realization of the plan from the engine's expert map to reshuffled weights.
func (d *demo) reshuffle(ctx context.Context) error {
	_, err := d.cluster.run(ctx, nil, "patch", "moed", "-n", namespace, d.name, "--type=merge", "-p", `{"spec":{"placement":{"realization":"ReshuffledWeights"}}}`)
	return err
}

// approve approves the plan for rollout with the annotation that a user would set, and returns the plan's forecast.
func (d *demo) approve(ctx context.Context) (*semmoev1.PlanForecast, error) {
	moed, err := d.get(ctx)
	if err != nil {
		return nil, err
	}
	plan := &semmoev1.PlacementPlan{}
	if err := d.read(ctx, plan, "pplan", moed.Status.Plan); err != nil {
		return nil, err
	}
	_, err = d.cluster.run(ctx, nil, "annotate", "moed", "-n", namespace, d.name, semmoev1.AnnotationApprove+"="+plan.Status.Plan)
	return plan.Status.Forecast, err
}
