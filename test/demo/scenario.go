package main

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

//go:embed moedeployment.yaml
var manifest string

const (
	namespace = "demo"
	name      = "tiny"
)

// demo is the scenario's state.
type demo struct {
	settings
	cluster *cluster
	out     *progress
	address string
}

// serve installs the operator, applies a MoEDeployment and waits until it serves.
func (d *demo) serve(ctx context.Context) error {
	if err := d.out.step(ctx, "kubectl apply -k config/default", func(func(string)) error {
		manifests, err := d.cluster.run(ctx, nil, "kustomize", "config/default")
		if err != nil {
			return err
		}
		manifests = strings.ReplaceAll(manifests, "image: semmoe:dev", "image: "+d.image)
		_, err = d.cluster.run(ctx, []byte(manifests), "apply", "--server-side", "-f", "-")
		return err
	}); err != nil {
		return err
	}
	if err := d.out.step(ctx, "operator available", func(func(string)) error {
		_, err := d.cluster.run(ctx, nil, "rollout", "status", "-n", "semmoe-system", "deployment/semmoe-manager", "--timeout=120s")
		return err
	}); err != nil {
		return err
	}
	if err := d.out.step(ctx, "kubectl apply -f moedeployment.yaml", func(func(string)) error {
		text := strings.NewReplacer("${IMAGE}", d.image, "${MODEL_PATH}", d.modelPath).Replace(manifest)
		_, err := d.cluster.run(ctx, []byte(text), "apply", "-f", "-")
		return err
	}); err != nil {
		return err
	}
	if err := d.out.step(ctx, "model in service", d.waitReady(ctx)); err != nil {
		return err
	}
	return d.out.step(ctx, "Service reachable", func(func(string)) (err error) {
		d.address, err = d.cluster.reach(ctx, namespace, name, 8000)
		return err
	})
}

// waitReady waits for the condition Ready with all replicas, and tells what the operator says meanwhile.
func (d *demo) waitReady(ctx context.Context) func(report func(string)) error {
	return func(report func(string)) error {
		const fields = `jsonpath={.status.conditions[?(@.type=="Ready")].status} {.status.conditions[?(@.type=="Progressing")].status} {.status.summary} {.status.conditions[?(@.type=="Ready")].message}`
		ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
		defer cancel()
		last := "no status yet"
		for {
			text, err := d.cluster.run(ctx, nil, "get", "moed", "-n", namespace, name, "-o", fields)
			if ctx.Err() != nil {
				return fmt.Errorf("not in service in time: %s", last)
			}
			if err != nil {
				return err
			}
			if strings.HasPrefix(text, "True False ") {
				return nil
			}
			if _, detail, ok := strings.Cut(strings.TrimSpace(text), " "); ok {
				if _, detail, ok = strings.Cut(detail, " "); ok {
					last = detail
					report(detail)
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
}

// remove deletes the MoEDeployment, and waits until nothing of it is left.
func (d *demo) remove(ctx context.Context) error {
	return d.out.step(ctx, "deleted, and nothing is left", func(report func(string)) error {
		if _, err := d.cluster.run(ctx, nil, "delete", "moed", "-n", namespace, name); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		for {
			left, err := d.cluster.run(ctx, nil, "get", "statefulsets,deployments,replicasets,jobs,pods,services,serviceaccounts,rolebindings,poddisruptionbudgets",
				"-n", namespace, "-l", "semmoe.io/deployment="+name, "-o", "name")
			if ctx.Err() != nil {
				return fmt.Errorf("still there: %s", strings.Join(strings.Fields(left), ", "))
			}
			if err != nil {
				return err
			}
			if strings.TrimSpace(left) == "" {
				return nil
			}
			select {
			case <-ctx.Done():
			case <-time.After(300 * time.Millisecond):
			}
		}
	})
}

// explain shows what a person would look at after a failure.
func (d *demo) explain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"describe", "moed", "-n", namespace, name},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"logs", "-n", "semmoe-system", "deployment/semmoe-manager", "--tail=50"},
	} {
		if text, err := d.cluster.run(ctx, nil, args...); err == nil {
			fmt.Printf("\n$ kubectl %s\n%s", strings.Join(args, " "), text)
		}
	}
}

// cleanUp takes away what an existing cluster was given; a local one goes as a whole.
func (d *demo) cleanUp() {
	if d.cluster.local != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for _, args := range [][]string{
		{"delete", "namespace", namespace, "--ignore-not-found"},
		{"delete", "-k", "config/default", "--ignore-not-found"},
	} {
		if _, err := d.cluster.run(ctx, nil, args...); err != nil {
			fmt.Fprintln(os.Stderr, "demo: clean up:", err)
		}
	}
}

func (d *demo) tellHowToReach() {
	kubectl := d.cluster.kubectl
	if path, err := exec.LookPath("kubectl"); err == nil {
		kubectl = path
	}
	fmt.Printf(`
Everything stays up until Ctrl-C. In another terminal:

  export KUBECONFIG=%s
  %s get moed -n %s
  %s describe moed -n %s %s
  curl http://%s/v1/models
  curl http://%s/v1/completions -H 'Content-Type: application/json' -d '{"model": "%s", "prompt": "func main() {", "max_tokens": 32}'
`, d.cluster.kubeconfig, kubectl, namespace, kubectl, namespace, name, d.address, d.address, name)
}
