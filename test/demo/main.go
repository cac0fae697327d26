// Command demo is the main job of the operator, seen through public interfaces alone: a cluster, the operator installed by
// kubectl, and then two acts.
//
// First act: a MoEDeployment is applied, its model served, prompts answered, and every answer compared with what the model is
// known to say. The model is profiled on one half of a corpus, and a plan is solved. The other half is sent to the model
// under the default placement; then the plan is approved and rolled out, and the same requests are sent again. The local
// activation rate must rise as the plan has promised, the ranks must stay balanced, and no output may change. Finally, the demo
// samples half of the requests, and the request routers report the cost of sampling.
//
// Second act: a MoEDeployment serves prose, under a plan for prose that its canary has proven. Then program code comes
// instead. The plan's test must find that within 80 sampled requests, and the operator, which checks once a minute, must report
// it; it profiles the model by what it has sampled, makes a new plan, and brings it into service: new tables, or a new
// layout by canary. The local activation rate of code that it has not seen must come to within 10% of what a plan made from scratch
// gives. A plan that is then pinned, and was solved for experts with other numbers, must be taken back by itself. Requests are
// sent all the while.
//
// No request of either act may fail, and no prompt may ever get another answer than before.
//
// It exits 0 only if all checks that it prints hold.
//
// Environment: ACTS=1 or ACTS=2 plays one act alone. KEEP=1 leaves the last act's deployment up until Ctrl-C and prints how to
// reach it. METRICS=127.0.0.1:9999 lets a Prometheus scrape all processes meanwhile, by http://127.0.0.1:9999/targets.
// KUBECONFIG names an existing cluster to use instead of a local one; it must be able to pull or hold IMAGE (default semmoe:dev), offer eight of the resource
// nvidia.com/gpu (any will do: the engine runs on CPUs), and hold the checkpoint at MODEL_PATH on its nodes (default: this
// repository's own). This machine must reach the addresses of its pods, as a node does: the demo reads the observations of request
// routers as a manager does. Where it has no default StorageClass, its nodes must share this machine's directories: the artifact
// store then keeps its files in bin/.
package main

import (
	"context"
	"errors"
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
)

type settings struct {
	keep       bool
	metrics    string // where metrics are offered; empty for nowhere
	kubeconfig string
	image      string
	modelPath  string
	repository string
	acts       []int // numbers, in order
}

// acts are all there are, by their numbers less one.
var acts = []struct {
	title, deployment string
	play              func(d *demo, ctx context.Context, texts texts) ([]check, error)
}{
	{"from a model to a plan", firstDeployment, (*demo).firstAct},
	{"the traffic changes", secondDeployment, (*demo).secondAct},
}

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
		keep:       os.Getenv("KEEP") != "" && os.Getenv("KEEP") != "0",
		metrics:    os.Getenv("METRICS"),
		kubeconfig: os.Getenv("KUBECONFIG"),
		image:      os.Getenv("IMAGE"),
		modelPath:  os.Getenv("MODEL_PATH"),
		repository: repository,
	}
	if s.acts, err = parseActs(os.Getenv("ACTS")); err != nil {
		return settings{}, err
	}
	if s.image == "" {
		s.image = "semmoe:dev"
	}
	if s.modelPath == "" {
		s.modelPath = filepath.Join(repository, checkpointDir)
	}
	return s, nil
}

// parseActs reads the numbers of acts, with commas between them; empty is all.
func parseActs(text string) ([]int, error) {
	var chosen []int
	for number := range acts {
		if text == "" || slices.Contains(strings.Split(text, ","), strconv.Itoa(number+1)) {
			chosen = append(chosen, number+1)
		}
	}
	if text != "" && len(chosen) != len(strings.Split(text, ",")) {
		return nil, fmt.Errorf("ACTS is %q; allowed are numbers from 1 to %d, each once, with commas between them", text, len(acts))
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
	out := newProgress(os.Stdout)
	c, err := startCluster(ctx, s, out)
	if err != nil {
		return err
	}
	defer func() { c.stop() }() // more is added to it later

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
	out.summary()
	failed := failed(checks)
	if failed == 0 {
		fmt.Printf("\nAll %d checks hold, in %.0f s.\n", len(checks), time.Since(out.start).Seconds())
	}
	if s.keep {
		last.tellHowToReach(ctx)
		<-ctx.Done()
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d checks failed", failed, len(checks))
	}
	return nil
}

// play is all acts that are asked for, one after the other. It returns the last one, and all checks.
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
		d.out.title(fmt.Sprintf("Act %d: %s", number, act.title))
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

var errInterrupted = errors.New("interrupted")
