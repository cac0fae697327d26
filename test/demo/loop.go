package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/corpus"
)

const (
	// requestBytes is about how long a request is.
	requestBytes = 180
	// heldOutPercent of the documents are never profiled: they are what is measured.
	heldOutPercent = 50
	splitSeed      = 1
	// leastHeldOut is the number of requests below which window figures mean little.
	leastHeldOut = 400
	pollInterval = 400 * time.Millisecond
)

// readCorpus returns the requests to profile and those that are held out.
func readCorpus(ctx context.Context) (train, heldOut []corpus.Request, err error) {
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	fromGo, err := corpus.FromGo(strings.TrimSpace(string(root)))
	if err != nil {
		return nil, nil, err
	}
	known, unknown := corpus.Split(append(corpus.Written(), fromGo...), heldOutPercent, splitSeed)
	train, heldOut = corpus.Requests(known, requestBytes), corpus.Requests(unknown, requestBytes)
	if len(heldOut) < leastHeldOut {
		return nil, nil, fmt.Errorf("the corpus has %d held-out requests on this machine; at least %d are needed", len(heldOut), leastHeldOut)
	}
	return train, heldOut, nil
}

// applyDataset gives the operator the requests to profile.
func (d *demo) applyDataset(ctx context.Context, train []corpus.Request) error {
	lines, err := corpus.JSONL(train)
	if err != nil {
		return err
	}
	for _, object := range []map[string]any{
		{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": namespace}},
		{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"namespace": namespace, "name": "corpus"}, "data": map[string]string{"dataset.jsonl": string(lines)}},
	} {
		data, err := json.Marshal(object)
		if err != nil {
			return err
		}
		if _, err := d.cluster.run(ctx, data, "apply", "--server-side", "-f", "-"); err != nil {
			return err
		}
	}
	return nil
}

// closeLoop waits for the plan, measures the default placement, lets the plan be rolled out, and measures again.
func (d *demo) closeLoop(ctx context.Context, heldOut []corpus.Request, r *report) error {
	if err := d.out.step(ctx, "model profiled", d.waitCondition(ctx, semmoev1.ConditionProfiled, d.profileProgress)); err != nil {
		return err
	}
	if err := d.out.step(ctx, "plan solved", d.waitCondition(ctx, semmoev1.ConditionPlanned, nil)); err != nil {
		return err
	}
	if err := d.out.step(ctx, "default placement measured", func(tell func(string)) (err error) {
		r.before, err = d.measure(ctx, heldOut, tell)
		return err
	}); err != nil {
		return err
	}
	if err := d.out.step(ctx, "plan approved", func(func(string)) error { return d.approve(ctx) }); err != nil {
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
		return fmt.Errorf("the status of the MoEDeployment names plan %q and the local activation rate %+v: want a plan and its prediction", moed.Status.PlanDigest, moed.Status.LAR)
	}
	r.plan, r.predicted = moed.Status.PlanDigest, float64(*moed.Status.LAR.PredictedMilli)/1000
	r.checks = append(r.checks, checkPlan(r.before, r.after, r.plan, r.predicted)...)

	if r.inTurn, err = d.measureInTurn(ctx, heldOut); err != nil {
		return err
	}
	r.checks = append(r.checks, checkInTurn(r.after, r.inTurn)...)

	if err := d.out.step(ctx, "reshuffled weights asked for", func(func(string)) error { return d.reshuffle(ctx) }); err != nil {
		return err
	}
	if r.reshuffled, err = d.measurePlan(ctx, "reshuffled weights", heldOut); err != nil {
		return err
	}
	r.checks = append(r.checks, checkReshuffled(r.before, r.after, r.reshuffled)...)
	return nil
}

// measurePlan waits until the plan is in service, and measures it.
func (d *demo) measurePlan(ctx context.Context, what string, heldOut []corpus.Request) (*measurement, error) {
	if err := d.out.step(ctx, what+" rolled out", d.waitCondition(ctx, semmoev1.ConditionRolledOut, nil)); err != nil {
		return nil, err
	}
	if err := d.out.step(ctx, "plan in the request routers", d.waitRouters(ctx)); err != nil {
		return nil, err
	}
	var measured *measurement
	return measured, d.out.step(ctx, what+" measured", func(tell func(string)) (err error) {
		if measured, err = d.measure(ctx, heldOut, tell); err != nil {
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

// reshuffle asks for the same plan without the engine's expert map.
func (d *demo) reshuffle(ctx context.Context) error {
	_, err := d.cluster.run(ctx, nil, "patch", "moed", "-n", namespace, name, "--type=merge", "-p", `{"spec":{"placement":{"realization":"ReshuffledWeights"}}}`)
	return err
}

// get reads the MoEDeployment.
func (d *demo) get(ctx context.Context) (*semmoev1.MoEDeployment, error) {
	moed := &semmoev1.MoEDeployment{}
	return moed, d.read(ctx, "moed", name, moed)
}

func (d *demo) read(ctx context.Context, kind, name string, into any) error {
	text, err := d.cluster.run(ctx, nil, "get", kind, "-n", namespace, name, "-o", "json")
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(text), into)
}

// waitCondition waits until a condition of the MoEDeployment is True, and tells its message, and progress where there is
// any, meanwhile. progress may be nil.
func (d *demo) waitCondition(ctx context.Context, kind string, progress func(context.Context, *semmoev1.MoEDeployment) string) func(tell func(string)) error {
	return func(tell func(string)) error {
		return poll(ctx, tell, func(ctx context.Context) (string, bool, error) {
			moed, err := d.get(ctx)
			if err != nil {
				return "", false, err
			}
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
}

// poll calls f until it is done, and tells the details. It fails with the last detail.
func poll(ctx context.Context, tell func(string), f func(ctx context.Context) (detail string, done bool, err error)) error {
	const limit = 3 * time.Minute
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	last := "nothing was seen"
	for {
		detail, done, err := f(ctx)
		if ctx.Err() != nil {
			return fmt.Errorf("not within %v: %s", limit, last)
		}
		if err != nil || done {
			return err
		}
		last = detail
		tell(detail)
		select {
		case <-ctx.Done():
		case <-time.After(pollInterval):
		}
	}
}

// profileProgress is how far the profile is; empty while that is not known.
func (d *demo) profileProgress(ctx context.Context, moed *semmoev1.MoEDeployment) string {
	if moed.Status.Profile == "" {
		return ""
	}
	profile := &semmoev1.AffinityProfile{}
	if d.read(ctx, "aprof", moed.Status.Profile, profile) != nil || profile.Status.Progress == nil {
		return ""
	}
	p := profile.Status.Progress
	return fmt.Sprintf("%d of %d requests, %d tokens/s, %d s left: ", p.RequestsDone, p.RequestsTotal, p.TokensPerSecond, p.RemainingSeconds)
}

// approve names the plan that may be rolled out, as a person would.
func (d *demo) approve(ctx context.Context) error {
	moed, err := d.get(ctx)
	if err != nil {
		return err
	}
	plan := &semmoev1.PlacementPlan{}
	if err := d.read(ctx, "pplan", moed.Status.Plan, plan); err != nil {
		return err
	}
	_, err = d.cluster.run(ctx, nil, "annotate", "moed", "-n", namespace, name, semmoev1.AnnotationApprove+"="+plan.Status.Plan)
	return err
}

// waitRouters waits until every request router has loaded the plan of every engine pod.
func (d *demo) waitRouters(ctx context.Context) func(tell func(string)) error {
	return func(tell func(string)) error {
		return poll(ctx, tell, func(ctx context.Context) (string, bool, error) {
			err := d.eachPod(ctx, "router", 9090, "metrics", func(metrics string) error {
				plans := map[string]float64{}
				for sample := range samples(metrics, "semmoe_router_plans") {
					plans[sample.labels] = sample.value
				}
				if plans[`state="loaded"`] != 1 || plans[`state="pending"`] != 0 {
					return fmt.Errorf("plans are %v; want one that is loaded", plans)
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
