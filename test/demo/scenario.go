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
)

const namespace = "demo"

// demo is the scenario's state.
type demo struct {
	settings
	cluster *cluster
	out     *progress
	ledger  *ledger
	client  *http.Client
	// name is that of the act's MoEDeployment, address where its Service is reached.
	name, address string
	// routers is the label of the request routers behind it.
	routers string
	volume  string // the artifact store's directory, where the demo has made one
}

// act is the demo with a MoEDeployment of that name.
func (d *demo) act(name string) *demo {
	act := *d
	act.name, act.routers = name, name
	return &act
}

// rolloutTimeout is the flag by which kubectl waits for a Deployment as long as a step may take under the present load.
func rolloutTimeout() string {
	return fmt.Sprintf("--timeout=%.0fs", load.Scale(stepLimit).Seconds())
}

// install installs the operator and the artifact store.
func (d *demo) install(ctx context.Context) error {
	if err := d.out.step(ctx, "kubectl apply -k config/default", func(func(string)) error {
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
	return d.out.step(ctx, "operator and store available", func(func(string)) error {
		for _, deployment := range []string{"deployment/semmoe-manager", "deployment/semmoe-store"} {
			if _, err := d.cluster.run(ctx, nil, "rollout", "status", "-n", "semmoe-system", deployment, rolloutTimeout()); err != nil {
				return err
			}
		}
		return nil
	})
}

// serve applies the act's MoEDeployment, from a file of this directory, and waits until it serves.
func (d *demo) serve(ctx context.Context, file, manifest string) error {
	if err := d.out.step(ctx, "kubectl apply -f "+file, func(func(string)) error {
		text := strings.NewReplacer("${NAME}", d.name, "${IMAGE}", d.image, "${MODEL_PATH}", d.modelPath).Replace(manifest)
		_, err := d.cluster.run(ctx, []byte(text), "apply", "-f", "-")
		return err
	}); err != nil {
		return err
	}
	if err := d.out.step(ctx, "model in service", d.waitReady(ctx)); err != nil {
		return err
	}
	return d.out.step(ctx, "Service reachable", func(func(string)) (err error) {
		d.address, err = d.cluster.reach(ctx, namespace, d.name, 8000)
		return err
	})
}

// apply applies objects.
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

// remove deletes the act's MoEDeployment, and profiles and plans that were made beside it, and waits until nothing is left.
func (d *demo) remove(ctx context.Context) error {
	return d.out.step(ctx, "deleted, and nothing is left", func(tell func(string)) error {
		for _, what := range [][]string{{"moed", d.name}, {"aprof,pplan", "--all"}} {
			if _, err := d.cluster.run(ctx, nil, append([]string{"delete", "-n", namespace}, what...)...); err != nil {
				return err
			}
		}
		return poll(ctx, tell, func(ctx context.Context) (string, bool, error) {
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

// explain shows what a person would look at after a failure. Whoever interrupts the demo does not wait for it.
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

// cleanUp takes away what an existing cluster was given; a local one goes as a whole.
func (d *demo) cleanUp() {
	if d.cluster.local != nil {
		return
	}
	// Each has its own time: one that hangs must not keep the others from being done.
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

func (d *demo) tellHowToReach(ctx context.Context) {
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
