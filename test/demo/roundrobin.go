package main

import (
	"context"
	"encoding/json"

	"github.com/semmoe/operator/test/corpus"
)

// turns is the name of a request router that deals requests out in turn, beside the operator's own.
const turns = "in-turn"

// measureInTurn measures the placement that is in service with requests that are dealt out to the ranks in turn: what of the
// gain is the request router's.
func (d *demo) measureInTurn(ctx context.Context, heldOut []corpus.Request) (measured *measurement, err error) {
	beside := *d
	beside.routers = turns
	if err := d.out.step(ctx, "another request router, in turn", func(func(string)) (err error) {
		if err := d.routeInTurn(ctx); err != nil {
			return err
		}
		beside.address, err = d.cluster.reach(ctx, namespace, turns, 8000)
		return err
	}); err != nil {
		return nil, err
	}
	if err := d.out.step(ctx, "plan in the other request router", beside.waitRouters(ctx)); err != nil {
		return nil, err
	}
	if err := d.out.step(ctx, "requests in turn measured", func(tell func(string)) (err error) {
		measured, err = beside.measure(ctx, heldOut, tell)
		return err
	}); err != nil {
		return nil, err
	}
	_, err = d.cluster.run(ctx, nil, "delete", "deployment,service", "-n", namespace, turns)
	return measured, err
}

// routeInTurn runs one more request router over the same pods: the operator's Deployment under another name, with another
// policy. The Service of the MoEDeployment does not lead to it.
func (d *demo) routeInTurn(ctx context.Context) error {
	deployment := map[string]any{}
	if err := d.read(ctx, &deployment, "deployment", d.name+"-router"); err != nil {
		return err
	}
	spec := deployment["spec"].(map[string]any)
	template := spec["template"].(map[string]any)
	labels := template["metadata"].(map[string]any)["labels"].(map[string]any)
	labels["semmoe.io/deployment"] = turns
	pod := template["spec"].(map[string]any)
	delete(pod, "topologySpreadConstraints") // they name the operator's own pods
	container := pod["containers"].([]any)[0].(map[string]any)
	container["args"] = append(container["args"].([]any), "--policy=round-robin")
	spec["replicas"] = 1
	spec["selector"] = map[string]any{"matchLabels": labels}
	metadata := map[string]any{"namespace": namespace, "name": turns}
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
	_, err := d.cluster.run(ctx, nil, "rollout", "status", "-n", namespace, "deployment/"+turns, rolloutTimeout())
	return err
}
