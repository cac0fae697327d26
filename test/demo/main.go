// SPDX-License-Identifier: Apache-2.0

// Command demo runs the operator's main workflow through public interfaces only. It starts a cluster, installs the
// operator with kubectl, and runs the first two of three acts.
//
// First act: the demo applies a MoEDeployment, sends prompts to its model, and compares every answer with the reference
// answers of the model. The operator profiles the model on one half of a corpus and solves a plan. The demo sends the
// other half under the default placement, approves the plan, waits for the rollout, and sends the same requests again.
// The local activation rate must rise as the plan predicts, the ranks must stay balanced, and no output may change.
// Finally, the demo samples half of the requests, and the request routers report the cost of sampling.
//
// Second act: a MoEDeployment serves prose, under a plan for prose that its canary has proven. Then the traffic changes
// to program code. The plan's drift test must detect the change within 80 sampled requests, and the operator, which
// checks once a minute, must report it. The operator profiles the model on the sampled requests, solves a new plan, and
// rolls it out, as new tables or as a new layout with a canary. On held-out code, the local activation rate must be
// within 10% of the rate of a plan solved from scratch. The demo then pins a plan that was solved for renumbered
// experts. The operator must roll that plan back without user action. Requests are sent during the whole act.
//
// Third act, only with ACTS=3: a MoEDeployment serves prose with tensor-parallel attention. The engines send each token
// to a rank by the tables of a plan, and count local activations. When the traffic changes to program code, the operator
// must find the drift in the counters and make new tables for the same placement, which reach the engines without a
// restart. The observed rate must then be within 10% of the promise, and no answer may change.
//
// In all acts no request may fail, and repeated prompts must get identical answers.
//
// The exit code is 0 only if all printed checks hold.
//
// Environment variables:
//
//   - ACTS=1, 2 or 3 runs one act only, ACTS=1,2,3 runs all. Default: 1,2.
//   - KEEP=1 keeps the last act's deployment until Ctrl-C and prints how to reach it.
//   - METRICS=127.0.0.1:9999 lets a Prometheus server scrape all processes, through http://127.0.0.1:9999/targets.
//   - KUBECONFIG names an existing cluster to use instead of a local one. The cluster must be able to pull or hold
//     IMAGE (default semmoe:dev) and ENGINE_IMAGE (default semmoe-refengine:dev), offer eight units of the resource nvidia.com/gpu (real GPUs are not needed: the
//     engine runs on CPUs), and hold the checkpoint at MODEL_PATH on its nodes (default: the checkpoint in this
//     repository). This machine must reach the pod addresses, as a node does, because the demo reads the
//     observations of request routers like a manager. In a cluster without a default StorageClass, the nodes must
//     share this machine's directories: the artifact store then keeps its files in bin/.
package main

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/progress"
)

type settings struct {
	keep       bool
	metrics    string // address of the metrics server; empty for none
	kubeconfig string
	image      string
	// engineImage is the image of the reference engine.
	engineImage string
	modelPath   string
	repository  string
	acts        []int // numbers, in order
}

// acts lists all acts. The index is the act number minus 1.
var acts = []struct {
	title, deployment string
	play              func(d *demo, ctx context.Context, texts texts) ([]check, error)
}{
	{"from a model to a plan", firstDeployment, (*demo).firstAct},
	{"the traffic changes", secondDeployment, (*demo).secondAct},
	{"tokens follow their experts", thirdDeployment, (*demo).thirdAct},
}

// defaultActs are the acts of a demo that selects none. The third one takes longer than both others.
const defaultActs = "1,2"

func main() {
	localcluster.RunChildIfAsked()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "\ndemo: FAILED: %v\n", err)
		os.Exit(1)
	}
}

func readSettings() (settings, error) {
	repository, err := os.Getwd()
	if err != nil {
		return settings{}, err
	}
	if _, err := os.Stat(filepath.Join(repository, "config", "default", "kustomization.yaml")); err != nil {
		return settings{}, fmt.Errorf("run this in the root of the repository: %w", err)
	}
	s := settings{
		keep:        os.Getenv("KEEP") != "" && os.Getenv("KEEP") != "0",
		metrics:     os.Getenv("METRICS"),
		kubeconfig:  os.Getenv("KUBECONFIG"),
		image:       cmp.Or(os.Getenv("IMAGE"), "semmoe:dev"),
		engineImage: cmp.Or(os.Getenv("ENGINE_IMAGE"), "semmoe-refengine:dev"),
		modelPath:   os.Getenv("MODEL_PATH"),
		repository:  repository,
	}
	if s.acts, err = parseActs(cmp.Or(os.Getenv("ACTS"), defaultActs)); err != nil {
		return settings{}, err
	}
	if s.modelPath == "" {
		s.modelPath = filepath.Join(repository, checkpointDir)
	}
	return s, nil
}

// parseActs parses a comma-separated list of act numbers.
func parseActs(text string) ([]int, error) {
	var chosen []int
	for number := range acts {
		if slices.Contains(strings.Split(text, ","), strconv.Itoa(number+1)) {
			chosen = append(chosen, number+1)
		}
	}
	if len(chosen) != len(strings.Split(text, ",")) {
		return nil, fmt.Errorf("ACTS: %q is invalid: distinct numbers from 1 to %d, separated by commas, are allowed", text, len(acts))
	}
	return chosen, nil
}

func run(ctx context.Context) error {
	s, err := readSettings()
	if err != nil {
		return err
	}
	texts, err := readTexts(ctx, filepath.Join(s.repository, checkpointDir, "golden.json"))
	if err != nil {
		return err
	}
	out := progress.New(os.Stdout)
	c, err := startCluster(ctx, s, out)
	if err != nil {
		return err
	}
	defer func() { c.stop() }() // read late: portForward extends stop

	d := &demo{settings: s, cluster: c, out: out, ledger: newLedger(), client: &http.Client{Transport: http.DefaultTransport}}
	defer d.cleanUp()
	last, checks, err := d.play(ctx, texts)
	if err != nil {
		d.explain(ctx)
		return err
	}
	whole := d.ledger.checks()
	printChecks(os.Stdout, whole)
	checks = append(checks, whole...)
	out.Summary()
	failed := failed(checks)
	if failed == 0 {
		fmt.Printf("\nAll %d checks hold, in %.0f s.\n", len(checks), time.Since(out.Start).Seconds())
	}
	if s.keep {
		last.printAccess(ctx)
		<-ctx.Done()
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d checks failed", failed, len(checks))
	}
	return nil
}

// play installs the operator and runs the selected acts in order. It returns the last act, and the checks of all acts.
func (d *demo) play(ctx context.Context, texts texts) (last *demo, checks []check, err error) {
	if err := d.install(ctx); err != nil {
		return nil, nil, err
	}
	if d.settings.metrics != "" {
		if err := d.offerMetrics(ctx, d.settings.metrics); err != nil {
			return nil, nil, err
		}
	}
	for i, number := range d.acts {
		act := acts[number-1]
		d.out.Title(fmt.Sprintf("Act %d: %s", number, act.title))
		last = d.act(act.deployment)
		found, err := act.play(last, ctx, texts)
		checks = append(checks, found...)
		if err != nil {
			return last, checks, err
		}
		if d.keep && i == len(d.acts)-1 {
			break
		}
		if err := last.remove(ctx); err != nil {
			return last, checks, err
		}
	}
	return last, checks, nil
}
