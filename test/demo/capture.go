// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/semmoe/operator/test/corpus"
)

const (
	// sampledPercent of the requests are sampled while the demo measures the cost of sampling.
	sampledPercent = 50
	// maxCaptureRounds is the maximum number of times that the demo sends all requests to measure the cost. A request
	// router reports the cost after 100 requests of each kind: two rounds are enough for two routers with equal shares.
	maxCaptureRounds = 8
)

// captured is the result of sending requests while half of them are sampled.
type captured struct {
	served *measurement
	// costs has the cost of sampling that each request router reports.
	costs []captureCost
}

// captureCost is the time per token of the sampled requests over the time per token of the others. Both fields are NaN
// while the request router has too few requests of either kind.
type captureCost struct{ ratio, standardError float64 }

func (c captureCost) known() bool { return !math.IsNaN(c.ratio) && !math.IsNaN(c.standardError) }

// measureCapture samples half of the requests, and sends all requests until each request router reports the cost. Each
// request opens a new connection, so that the requests are distributed over the routers.
func (d *demo) measureCapture(ctx context.Context, heldOut []corpus.Request) (c captured, err error) {
	if err := d.out.Step(ctx, fmt.Sprintf("%d%% of the requests sampled", sampledPercent), d.sample(ctx)); err != nil {
		return c, err
	}
	if err := d.out.Step(ctx, "plan in the request routers", d.waitRouters(ctx)); err != nil {
		return c, err
	}
	spread := *d
	spread.client = newConnections()
	return c, d.out.Step(ctx, "cost of sampling measured", func(update func(string)) (err error) {
		c.costs, err = untilKnown(func() ([]captureCost, error) {
			if c.served, err = spread.measure(ctx, heldOut, update); err != nil {
				return nil, err
			}
			return d.captureCosts(ctx)
		})
		return err
	})
}

// newConnections returns a client that opens a new connection for each request. A Service selects a pod for each
// connection, and with kept connections one router may get almost no requests.
func newConnections() *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DisableKeepAlives = true
	return &http.Client{Transport: transport}
}

// untilKnown measures until the cost of each request router is known, at most maxCaptureRounds times.
func untilKnown(measure func() ([]captureCost, error)) (costs []captureCost, err error) {
	for range maxCaptureRounds {
		if costs, err = measure(); err != nil || !slices.ContainsFunc(costs, func(cost captureCost) bool { return !cost.known() }) {
			break
		}
	}
	return costs, err
}

// captureCosts reads the cost of sampling from each request router.
func (d *demo) captureCosts(ctx context.Context) (costs []captureCost, err error) {
	return costs, d.eachPod(ctx, "router", 9090, "metrics", func(metrics string) error {
		cost := captureCost{math.NaN(), math.NaN()}
		for s := range samples(metrics, "semmoe_capture_cost_ratio") {
			cost.ratio = s.value
		}
		for s := range samples(metrics, "semmoe_capture_cost_ratio_standard_error") {
			cost.standardError = s.value
		}
		costs = append(costs, cost)
		return nil
	})
}

// sample returns a step that sets spec.routing.samplePercent and waits until all request routers use the new value.
func (d *demo) sample(ctx context.Context) func(update func(string)) error {
	return func(update func(string)) error {
		if _, err := d.cluster.run(ctx, nil, "patch", "moed", "-n", namespace, d.name, "--type=merge",
			"-p", fmt.Sprintf(`{"spec":{"routing":{"samplePercent":%d}}}`, sampledPercent)); err != nil {
			return err
		}
		return poll(ctx, update, func(ctx context.Context) (string, bool, error) {
			var routers appsv1.Deployment
			if err := d.read(ctx, &routers, "deployment", d.name+"-router"); err != nil {
				return "", false, err
			}
			asked := slices.Contains(routers.Spec.Template.Spec.Containers[0].Args, fmt.Sprintf("--sample-percent=%d", sampledPercent))
			s := routers.Status
			done := asked && s.ObservedGeneration == routers.Generation && s.UpdatedReplicas == *routers.Spec.Replicas && s.Replicas == s.UpdatedReplicas && s.AvailableReplicas == s.Replicas
			if done { // an idle connection to a terminating router may close while a request is sent
				d.client.CloseIdleConnections()
			}
			return fmt.Sprintf("%d of %d request routers are new, of %d", s.UpdatedReplicas, *routers.Spec.Replicas, s.Replicas), done, nil
		})
	}
}

// checkCapture compares the outputs with the outputs before half of the requests were sampled. At least one request
// router must report the cost: if the cluster routes all connections to one router, the other routers have no requests.
// No check bounds the cost, because it depends on the load of the machine.
func checkCapture(before *measurement, c captured) []check {
	reported, costs := 0, []string(nil)
	for _, cost := range c.costs {
		if !cost.known() {
			costs = append(costs, "too few requests")
			continue
		}
		reported++
		costs = append(costs, fmt.Sprintf("%.2f ± %.2f", cost.ratio, cost.standardError))
	}
	detail := strings.Join(costs, ", ") + " times the time per token of other requests, by request router"
	return []check{
		checkOutputs("sampling does not change the outputs", before, c.served),
		{"the cost of sampling is reported", reported > 0, detail},
	}
}
