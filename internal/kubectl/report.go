package kubectl

import (
	"bytes"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/kubectl/view"
	"github.com/semmoe/operator/internal/report"
	"github.com/semmoe/operator/internal/wholefile"
	"github.com/semmoe/operator/solver"
)

func (p *Program) reportCommand() *cobra.Command {
	var out, current string
	cmd := &cobra.Command{
		Use: "report PLAN --out FILE", Short: "Write a page that shows what would change under a plan",
		Long: "Write the page of semmoe report from a PlacementPlan: its promise, as its status states it, and what would change against the plan that it\n" +
			"was made to replace, or against the default placement. Figures by layer and batch size need the routing trace, which the artifact store gives\n" +
			"only to the operator. With a trace of yours, use semmoe report --plan DIR --trace FILE.",
		Args: arguments(1, 1), ValidArgsFunction: p.completed(1, planNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if out == "" {
				return usageErrorf("--out is missing: name the file for the page")
			}
			if err := notEmpty(cmd, "current"); err != nil {
				return err
			}
			if err := wholefile.Check(out); err != nil {
				return usageErrorf("--out: %w", err)
			}
			return p.report(cmd.Context(), args[0], current, out)
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "HTML file; one that is there is replaced (required)")
	cmd.Flags().StringVar(&current, "current", "", "PlacementPlan to compare with (default: that which the plan was made to replace, else the default placement)")
	_ = cmd.RegisterFlagCompletionFunc("current", p.completed(2, planNames)) // it fails for flags that are not there alone
	return cmd
}

// reportDocument is what report prints as JSON.
type reportDocument struct {
	Plan    string `json:"plan"`
	File    string `json:"file"`
	Summary string `json:"summary"`
}

func (p *Program) report(ctx context.Context, name, current, out string) error {
	cluster, err := p.open()
	if err != nil {
		return err
	}
	of, err := cluster.plan(ctx, name)
	if err != nil {
		return err
	}
	in := report.Input{Name: of.Name, Digest: of.Status.PlanDigest, BatchTokens: solver.DefaultEvaluation().BatchTokens, Promise: promised(of)}
	if in.Plan, err = cluster.solved(ctx, of); err != nil {
		return err
	}
	before, err := cluster.replaced(ctx, of, current)
	if err != nil {
		return err
	}
	if before == nil && of.Spec.Current != nil {
		p.warn("plan %s, which PlacementPlan %s was made to replace, is gone: it is compared with the default placement; name another plan by --current",
			artifact.Digest(of.Spec.Current.PlanDigest).Short(), of.Name)
	}
	if before != nil {
		in.CurrentDigest = before.Status.PlanDigest
		if in.Current, err = cluster.solved(ctx, before); err != nil {
			return err
		}
	}
	data, err := report.Build(ctx, in)
	if err != nil {
		return codedError{err, exitState}
	}
	var page bytes.Buffer
	if err := report.Render(&page, data); err != nil {
		return err
	}
	if err := wholefile.WriteBytes(out, 0o644, page.Bytes()); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	return p.write(reportDocument{of.Name, out, data.Summary()}, func() string {
		return p.style.Paragraph(terminal.Words(data.Summary(), terminal.Plain), 0) + p.style.Paragraph(terminal.Words("Written to "+out, terminal.Faint), 0)
	})
}

// promised returns what the status of a plan states of its worth.
func promised(plan *semmoev1.PlacementPlan) *report.Promise {
	milli := func(m int32) float64 { return float64(m) / 1000 }
	micros := func(nanos int64) float64 { return float64(nanos) / 1000 }
	p := &report.Promise{Verdict: view.Explain(plan, nil).Why + "."}
	f, c := plan.Status.Forecast, plan.Status.Comparison
	switch {
	case c != nil && c.Requests > 0:
		p.Against, p.On = "under the plan that it replaces", fmt.Sprintf(", on the last %d sampled requests", c.Requests)
		p.After, p.Before = milli(c.CandidateLARMilli), milli(c.CurrentLARMilli)
		p.LayerAfter, p.LayerBefore, p.Hardware = micros(c.CandidateNanos), micros(c.CurrentNanos), c.Hardware
	case c == nil && f != nil:
		p.Against, p.On = "in the default placement", ", on requests that the plan was not made from"
		p.After, p.Before, p.Bound = milli(f.LARMilli), milli(f.BaselineMilli), milli(f.UpperBoundMilli)
		p.RanksAfter, p.RanksBefore = milli(f.RemoteRanksMilli), milli(f.BaselineRemoteRanksMilli)
		p.LayerAfter, p.LayerBefore, p.Hardware = micros(f.LayerNanos), micros(f.BaselineLayerNanos), f.Hardware
	}
	return p
}

// solved is what the ConfigMap of a plan tells of it: no tables.
func (c *Cluster) solved(ctx context.Context, of *semmoev1.PlacementPlan) (*solver.Plan, error) {
	l, err := c.layout(ctx, of)
	if err != nil {
		return nil, err
	}
	m := l.Manifest
	return &solver.Plan{
		Attention: m.Attention, Forecast: m.Forecast, Algorithm: m.Algorithm, Placement: l.Placement, Objective: m.Objective,
		HiddenLayers: m.HiddenLayers, Vocabulary: m.Vocabulary, ModelDigest: m.ModelDigest, Layout: m.Layout,
	}, nil
}

// replaced is the plan to compare with: the one that is named, or that the plan was made to replace; nil for the default placement, where
// it was made to replace none, or one that is gone.
func (c *Cluster) replaced(ctx context.Context, of *semmoev1.PlacementPlan, named string) (*semmoev1.PlacementPlan, error) {
	if named != "" {
		return c.plan(ctx, named)
	}
	if of.Spec.Current == nil {
		return nil, nil
	}
	plans, err := c.plans(ctx)
	for i := range plans {
		if plans[i].Status.PlanDigest == of.Spec.Current.PlanDigest {
			return &plans[i], nil
		}
	}
	return nil, err
}
