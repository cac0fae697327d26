package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/semmoe/operator/test/corpus"
)

const (
	// sampledPercent of the requests are samples when it is measured what that costs.
	sampledPercent = 50
	// captureRounds is how often all requests are sent for it: a request router tells the cost from a hundred of either kind on.
	captureRounds = 3
)

// captured is what requests show half of which were samples.
type captured struct {
	served *measurement
	// costs are, of each request router, the time per token of the sampled requests over that of the others, with its standard error.
	costs []captureCost
}

type captureCost struct{ ratio, standardError float64 }

// measureCapture has half of the requests sampled, and sends them again.
func (d *demo) measureCapture(ctx context.Context, heldOut []corpus.Request) (c captured, err error) {
	if err := d.out.step(ctx, fmt.Sprintf("%d%% of the requests sampled", sampledPercent), d.sample(ctx)); err != nil {
		return c, err
	}
	if err := d.out.step(ctx, "plan in the request routers", d.waitRouters(ctx)); err != nil {
		return c, err
	}
	return c, d.out.step(ctx, "cost of sampling measured", func(tell func(string)) (err error) {
		for range captureRounds {
			if c.served, err = d.measure(ctx, heldOut, tell); err != nil {
				return err
			}
		}
		return d.eachPod(ctx, "router", 9090, "metrics", func(metrics string) error {
			var cost captureCost
			for s := range samples(metrics, "semmoe_capture_cost_ratio") {
				cost.ratio = s.value
			}
			for s := range samples(metrics, "semmoe_capture_cost_ratio_standard_error") {
				cost.standardError = s.value
			}
			c.costs = append(c.costs, cost)
			return nil
		})
	})
}

// sample asks for other samples, and waits until all request routers take them.
func (d *demo) sample(ctx context.Context) func(tell func(string)) error {
	return func(tell func(string)) error {
		if _, err := d.cluster.run(ctx, nil, "patch", "moed", "-n", namespace, d.name, "--type=merge",
			"-p", fmt.Sprintf(`{"spec":{"routing":{"samplePercent":%d}}}`, sampledPercent)); err != nil {
			return err
		}
		return poll(ctx, tell, func(ctx context.Context) (string, bool, error) {
			var routers appsv1.Deployment
			if err := d.read(ctx, &routers, "deployment", d.name+"-router"); err != nil {
				return "", false, err
			}
			asked := slices.Contains(routers.Spec.Template.Spec.Containers[0].Args, fmt.Sprintf("--sample-percent=%d", sampledPercent))
			s := routers.Status
			done := asked && s.ObservedGeneration == routers.Generation && s.UpdatedReplicas == *routers.Spec.Replicas && s.Replicas == s.UpdatedReplicas && s.AvailableReplicas == s.Replicas
			if done { // one that is unused may lead to a router that goes, and end just when a request is sent by it
				http.DefaultClient.CloseIdleConnections()
			}
			return fmt.Sprintf("%d of %d request routers are new, of %d", s.UpdatedReplicas, *routers.Spec.Replicas, s.Replicas), done, nil
		})
	}
}

// checkCapture compares what is said while half of the requests are samples with what was said before. Times are told, and not judged: the
// machine of a demo has other work.
func checkCapture(before *measurement, c captured) []check {
	told, costs := len(c.costs) > 0, []string(nil)
	for _, cost := range c.costs {
		told = told && cost.ratio > 0
		costs = append(costs, fmt.Sprintf("%.2f ± %.2f", cost.ratio, cost.standardError))
	}
	detail := strings.Join(costs, ", ") + " times the time of the others, by each request router"
	return []check{checkOutputs("sampled or not, outputs are the same", before, c.served), {"what sampling costs is told", told, detail}}
}
