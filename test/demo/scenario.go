// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/progress"
)

const namespace = "demo"

// demo holds the state of a run, and of the current act.
type demo struct {
	settings
	cluster *cluster
	out     *progress.Progress
	ledger  *ledger
	client  *http.Client
	// name is the name of the act's MoEDeployment, address the address of its Service.
	name, address string
	// routers is the value of the label semmoe.io/deployment of the request routers to measure.
	routers string
	volume  string // directory of the artifact store; empty unless the demo created one
}

// act returns a copy of the demo for the MoEDeployment with the given name.
func (d *demo) act(name string) *demo {
	act := *d
	act.name, act.routers = name, name
	return &act
}

// rolloutTimeout returns the kubectl flag that limits a rollout to the duration of a step under the current machine
// load.
func rolloutTimeout() string {
	return fmt.Sprintf("--timeout=%.0fs", load.Scale(stepLimit).Seconds())
}

// install installs the operator and the artifact store.
func (d *demo) install(ctx context.Context) error {
	if err := d.out.Step(ctx, "kubectl apply -k config/default", func(func(string)) error {
		manifests, err := d.cluster.run(ctx, nil, "kustomize", "config/default")
		if err != nil {
			return err
		}
		manifests = strings.ReplaceAll(manifests, "image: semmoe:dev", "image: "+d.image)
		if err := d.offerVolume(ctx); err != nil {
			return err
		}
		_, err = d.cluster.run(ctx, []byte(manifests), "apply", "--server-side", "-f", "-")
		return err
	}); err != nil {
		return err
	}
	return d.out.Step(ctx, "operator and store available", func(func(string)) error {
		for _, deployment := range []string{"deployment/semmoe-manager", "deployment/semmoe-store"} {
			if _, err := d.cluster.run(ctx, nil, "rollout", "status", "-n", "semmoe-system", deployment, rolloutTimeout()); err != nil {
				return err
			}
		}
		return nil
	})
}

// serve applies the act's MoEDeployment from the manifest of a file in this directory, and waits until it serves
// requests.
func (d *demo) serve(ctx context.Context, file, manifest string) error {
	if err := d.out.Step(ctx, "kubectl apply -f "+file, func(func(string)) error {
		text := strings.NewReplacer("${NAME}", d.name, "${ENGINE_IMAGE}", d.engineImage, "${MODEL_PATH}", d.modelPath).Replace(manifest)
		_, err := d.cluster.run(ctx, []byte(text), "apply", "-f", "-")
		return err
	}); err != nil {
		return err
	}
	if err := d.out.Step(ctx, "model in service", d.waitReady(ctx)); err != nil {
		return err
	}
	return d.out.Step(ctx, "Service reachable", func(func(string)) (err error) {
		d.address, err = d.cluster.reach(ctx, namespace, d.name, 8000)
		return err
	})
}

// apply applies the objects with server-side apply.
func (d *demo) apply(ctx context.Context, objects ...any) error {
	for _, object := range objects {
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

// remove deletes the act's MoEDeployment and all profiles and plans, and waits until no object of the operator is left.
func (d *demo) remove(ctx context.Context) error {
	return d.out.Step(ctx, "objects deleted, and nothing remains", func(update func(string)) error {
		for _, what := range [][]string{{"moed", d.name}, {"aprof,pplan", "--all"}} {
			if _, err := d.cluster.run(ctx, nil, append([]string{"delete", "-n", namespace}, what...)...); err != nil {
				return err
			}
		}
		return poll(ctx, update, func(ctx context.Context) (string, bool, error) {
			var left []string
			for _, what := range [][]string{
				{"affinityprofiles,placementplans"},
				{"statefulsets,deployments,replicasets,jobs,pods,services,serviceaccounts,rolebindings,poddisruptionbudgets,configmaps", "-l", "semmoe.io/component"},
			} {
				names, err := d.cluster.run(ctx, nil, append([]string{"get", "-n", namespace, "-o", "name"}, what...)...)
				if err != nil {
					return "", false, err
				}
				left = append(left, strings.Fields(names)...)
			}
			return "still there: " + strings.Join(left, ", "), len(left) == 0, nil
		})
	})
}

// explain prints objects, events and logs that help to diagnose a failure. It prints nothing if the demo was
// interrupted.
func (d *demo) explain(ctx context.Context) {
	if ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"describe", "moed", "-n", namespace},
		{"describe", "aprof,pplan", "-n", namespace},
		{"get", "events", "-A", "--sort-by=.metadata.creationTimestamp"},
		{"logs", "-n", "semmoe-system", "deployment/semmoe-manager", "--tail=50"},
		{"logs", "-n", "semmoe-system", "deployment/semmoe-store", "--tail=20"},
	} {
		if text, err := d.cluster.run(ctx, nil, args...); err == nil {
			fmt.Printf("\n$ kubectl %s\n%s", strings.Join(args, " "), text)
		}
	}
}

// cleanUp deletes the objects of the demo from an existing cluster. A local cluster is removed as a whole.
func (d *demo) cleanUp() {
	if d.cluster.local != nil {
		return
	}
	// Each deletion has its own timeout, so that one that hangs does not prevent the others.
	attempt := func(f func(ctx context.Context) error) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := f(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "demo: clean up:", err)
		}
	}
	for _, args := range [][]string{
		{"delete", "namespace", namespace, "--ignore-not-found"},
		{"delete", "clusterrolebinding", scraper, "--ignore-not-found"},
		{"delete", "-k", "config/default", "--ignore-not-found"},
	} {
		attempt(func(ctx context.Context) error {
			_, err := d.cluster.run(ctx, nil, args...)
			return err
		})
	}
	attempt(d.removeVolume)
}

// printAccess prints the objects of the act, and the commands that reach its Service.
func (d *demo) printAccess(ctx context.Context) {
	kubectl := d.cluster.kubectl
	if path, err := exec.LookPath("kubectl"); err == nil {
		kubectl = path
	}
	if text, err := d.cluster.run(ctx, nil, "get", "moed,aprof,pplan", "-n", namespace); err == nil {
		fmt.Printf("\n$ kubectl get moed,aprof,pplan -n %s\n%s", namespace, text)
	}
	fmt.Printf(`
Everything stays up until Ctrl-C. In another terminal:

  export KUBECONFIG=%s
  %s get moed,aprof,pplan -n %s
  %s describe moed -n %s %s
  curl http://%s/v1/models
  curl http://%s/v1/completions -H 'Content-Type: application/json' -d '{"model": "%s", "prompt": "func main() {", "max_tokens": 32}'
`, d.cluster.kubeconfig, kubectl, namespace, kubectl, namespace, d.name, d.address, d.address, d.name)
}
