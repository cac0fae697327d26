// Command demo is the main job of the operator, seen through public interfaces alone.
//
// First act: a cluster, the operator installed by kubectl, a MoEDeployment applied, its model served, prompts answered,
// and every answer compared with what the model is known to say.
//
// Second act: the model is profiled on one half of a corpus, and a plan is solved. The other half is sent to the model
// under the default placement; then the plan is approved and rolled out, and the same requests are sent again. The local
// activation rate must rise as the plan has promised, the ranks must stay balanced, and no output may change.
//
// It exits 0 only if all checks that it prints hold.
//
// Environment: KEEP=1 leaves everything up until Ctrl-C and prints how to reach it. KUBECONFIG names an existing cluster
// to use instead of a local one; it must be able to pull or hold IMAGE (default semmoe:dev), offer eight of the resource
// nvidia.com/gpu (any will do: the engine runs on CPUs), and hold the checkpoint at MODEL_PATH on its nodes (default: this
// repository's own). Where it has no default StorageClass, its nodes must share this machine's directories: the artifact
// store then keeps its files in bin/.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/semmoe/operator/test/corpus"
	"github.com/semmoe/operator/test/localcluster"
)

type settings struct {
	keep       bool
	kubeconfig string
	image      string
	modelPath  string
	repository string
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
		kubeconfig: os.Getenv("KUBECONFIG"),
		image:      os.Getenv("IMAGE"),
		modelPath:  os.Getenv("MODEL_PATH"),
		repository: repository,
	}
	if s.image == "" {
		s.image = "semmoe:dev"
	}
	if s.modelPath == "" {
		s.modelPath = filepath.Join(repository, checkpointDir)
	}
	return s, nil
}

func run(ctx context.Context) error {
	s, err := readSettings()
	if err != nil {
		return err
	}
	golden, err := loadGolden(filepath.Join(s.repository, checkpointDir, "golden.json"))
	if err != nil {
		return err
	}
	train, heldOut, err := readCorpus(ctx)
	if err != nil {
		return err
	}
	out := newProgress(os.Stdout)
	c, err := startCluster(ctx, s, out)
	if err != nil {
		return err
	}
	defer func() { c.stop() }() // more is added to it later

	d := &demo{settings: s, cluster: c, out: out, routers: name}
	defer d.cleanUp()
	report, err := d.play(ctx, golden, train, heldOut)
	if err != nil {
		d.explain(ctx)
		return err
	}
	if !s.keep {
		if err := d.remove(ctx); err != nil {
			d.explain(ctx)
			return err
		}
	}
	report.print(os.Stdout)
	out.summary()
	failed := report.failed()
	if failed == 0 {
		fmt.Printf("\nAll %d checks hold, in %.0f s.\n", len(report.checks), time.Since(out.start).Seconds())
	}
	if s.keep {
		d.tellHowToReach(ctx)
		<-ctx.Done()
	}
	if failed > 0 {
		return fmt.Errorf("%d checks do not hold", failed)
	}
	return nil
}

// play is both acts.
func (d *demo) play(ctx context.Context, golden []goldenCase, train, heldOut []corpus.Request) (*report, error) {
	if err := d.serve(ctx, train); err != nil {
		return nil, err
	}
	answers, err := d.ask(ctx, golden)
	if err != nil {
		return nil, err
	}
	r := &report{answers: answers, checks: checkAnswers(answers)}
	return r, d.closeLoop(ctx, heldOut, r)
}

var errInterrupted = errors.New("interrupted")
