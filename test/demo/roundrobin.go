// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"

	"github.com/semmoe/operator/test/corpus"
)

// roundRobinName is the name of an additional request router with round-robin routing.
const roundRobinName = "round-robin"

// measureRoundRobin measures the current placement with round-robin routing. The difference to routing by the plan is
// the part of the gain that is due to the request router.
func (d *demo) measureRoundRobin(ctx context.Context, heldOut []corpus.Request) (measured *measurement, err error) {
	other := *d
	other.routers = roundRobinName
	if err := d.out.Step(ctx, "round-robin request router started", func(func(string)) (err error) {
		if err := d.routeRoundRobin(ctx); err != nil {
			return err
		}
		other.address, err = d.cluster.reach(ctx, namespace, roundRobinName, 8000)
		return err
	}); err != nil {
		return nil, err
	}
	if err := d.out.Step(ctx, "plan in the round-robin router", other.waitRouters(ctx)); err != nil {
		return nil, err
	}
	if err := d.out.Step(ctx, "round-robin routing measured", func(update func(string)) (err error) {
		measured, err = other.measure(ctx, heldOut, update)
		return err
	}); err != nil {
		return nil, err
	}
	_, err = d.cluster.run(ctx, nil, "delete", "deployment,service", "-n", namespace, roundRobinName)
	return measured, err
}

// routeRoundRobin starts another request router for the same pods: a copy of the operator's Deployment with another
// name and the policy round-robin. The Service of the MoEDeployment does not select its pod.
func (d *demo) routeRoundRobin(ctx context.Context) error {
	deployment := map[string]any{}
	if err := d.read(ctx, &deployment, "deployment", d.name+"-router"); err != nil {
		return err
	}
	spec := deployment["spec"].(map[string]any)
	template := spec["template"].(map[string]any)
	labels := template["metadata"].(map[string]any)["labels"].(map[string]any)
	labels["semmoe.io/deployment"] = roundRobinName
	pod := template["spec"].(map[string]any)
	delete(pod, "topologySpreadConstraints") // they select the operator's pods
	container := pod["containers"].([]any)[0].(map[string]any)
	container["args"] = append(container["args"].([]any), "--policy=round-robin")
	spec["replicas"] = 1
	spec["selector"] = map[string]any{"matchLabels": labels}
	metadata := map[string]any{"namespace": namespace, "name": roundRobinName}
	for _, object := range []map[string]any{
		{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec},
		{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": map[string]any{
			"selector": labels, "ports": []any{map[string]any{"port": 8000, "targetPort": 8000}},
		}},
	} {
		data, err := json.Marshal(object)
		if err != nil {
			return err
		}
		if _, err := d.cluster.run(ctx, data, "create", "-f", "-"); err != nil {
			return err
		}
	}
	_, err := d.cluster.run(ctx, nil, "rollout", "status", "-n", namespace, "deployment/"+roundRobinName, rolloutTimeout())
	return err
}
