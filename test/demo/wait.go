// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/load"
)

const pollInterval = 400 * time.Millisecond

// get reads the act's MoEDeployment.
func (d *demo) get(ctx context.Context) (*semmoev1.MoEDeployment, error) {
	moed := &semmoev1.MoEDeployment{}
	return moed, d.read(ctx, moed, "moed", d.name)
}

// read reads an object or a list in the demo's namespace. what holds arguments of kubectl get.
func (d *demo) read(ctx context.Context, into any, what ...string) error {
	text, err := d.cluster.run(ctx, nil, append([]string{"get", "-n", namespace, "-o", "json"}, what...)...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(text), into)
}

// waitMoED returns a step that polls the act's MoEDeployment until f reports done or an error.
func (d *demo) waitMoED(ctx context.Context, f func(*semmoev1.MoEDeployment) (detail string, done bool, err error)) func(update func(string)) error {
	return func(update func(string)) error {
		return poll(ctx, update, func(ctx context.Context) (string, bool, error) {
			moed, err := d.get(ctx)
			if err != nil {
				return "", false, err
			}
			return f(moed)
		})
	}
}

// waitCondition returns a step that waits until a condition of the MoEDeployment is True. While waiting, the step shows
// the result of progress, which may be nil, and the condition's message.
func (d *demo) waitCondition(ctx context.Context, kind string, progress func(context.Context, *semmoev1.MoEDeployment) string) func(update func(string)) error {
	return d.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		condition := meta.FindStatusCondition(moed.Status.Conditions, kind)
		if condition == nil || condition.ObservedGeneration != moed.Generation {
			return "no condition " + kind + " yet", false, nil
		}
		if condition.Reason == string(semmoev1.VerdictNoGainExpected) {
			return "", false, errors.New(condition.Message)
		}
		detail := condition.Message
		if progress != nil {
			detail = progress(ctx, moed) + detail
		}
		return detail, condition.Status == metav1.ConditionTrue, nil
	})
}

// answerLimit is the maximum duration of one request of a step on an idle machine. load.Scale adapts it to the load.
const answerLimit = time.Minute

// stepLimit is the maximum duration of a step on an idle machine, where every step takes less than a third of it.
const stepLimit = 5 * time.Minute

// poll calls f until f reports done or an error, and shows the details of f. After stepLimit, poll fails with the last
// detail.
func poll(ctx context.Context, update func(string), f func(ctx context.Context) (detail string, done bool, err error)) error {
	var clock load.Clock
	last := "nothing was observed"
	for clock.Elapsed() < stepLimit {
		answering, cancel := context.WithTimeout(ctx, load.Scale(answerLimit))
		detail, done, err := f(answering)
		late := answering.Err() != nil && ctx.Err() == nil
		cancel()
		if late {
			detail, done, err = "no answer within "+answerLimit.String(), false, nil
		}
		if err != nil || done {
			return err
		}
		last = detail
		update(detail)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pollInterval):
		}
	}
	return fmt.Errorf("timed out after %v (scaled by the machine load): %s", stepLimit, last)
}

// profileProgress describes the progress of the profile. It returns an empty string while the progress is unknown.
func (d *demo) profileProgress(ctx context.Context, moed *semmoev1.MoEDeployment) string {
	if moed.Status.Profile == "" {
		return ""
	}
	profile := &semmoev1.AffinityProfile{}
	if d.read(ctx, profile, "aprof", moed.Status.Profile) != nil || profile.Status.Progress == nil {
		return ""
	}
	p := profile.Status.Progress
	return fmt.Sprintf("%d of %d requests, %d tokens/s, %d s left: ", p.RequestsDone, p.RequestsTotal, p.TokensPerSecond, p.RemainingSeconds)
}

// waitReady returns a step that waits until all replicas are ready, in any revision. If the plan is solved early, one
// replica is already a canary, which waits for the requests that the demo sends next.
func (d *demo) waitReady(ctx context.Context) func(update func(string)) error {
	return d.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		ready := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionReady)
		if ready == nil {
			return "no status yet", false, nil
		}
		done := ready.Status == metav1.ConditionTrue && moed.Status.ReadyReplicas == *moed.Spec.Replicas
		return moed.Status.Summary + " " + ready.Message, done, nil
	})
}

// waitRouters returns a step that waits until every request router has loaded the plan of every engine pod.
func (d *demo) waitRouters(ctx context.Context) func(update func(string)) error {
	return func(update func(string)) error {
		return poll(ctx, update, func(ctx context.Context) (string, bool, error) {
			err := d.eachPod(ctx, "router", 9090, "metrics", func(metrics string) error {
				plans := map[string]float64{}
				for sample := range samples(metrics, "semmoe_router_plans") {
					plans[sample.labels] = sample.value
				}
				if plans[`state="loaded"`] != 1 || plans[`state="pending"`] != 0 {
					return fmt.Errorf("plans are %v; want one loaded plan and none pending", plans)
				}
				return nil
			})
			if err != nil {
				return err.Error(), false, nil
			}
			return "", true, nil
		})
	}
}
