// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"bytes"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/kubectl/view"
	"github.com/semmoe/operator/internal/report"
	"github.com/semmoe/operator/solver"
)

func (p *program) reportCommand() *cobra.Command {
	var out, current string
	cmd := &cobra.Command{
		Use: "report PLAN --out FILE", Short: "Write an HTML report of the changes that a plan makes",
		Long: "Write the HTML report of a PlacementPlan. It shows the promise in the plan's status, and the changes relative to the plan that it\n" +
			"replaces, or to the default placement. Figures by layer and batch size need the routing trace, which only the operator can read from\n" +
			"the artifact store. If you have a trace file, use semmoe report --plan DIR --trace FILE.",
		Args: arguments(1, 1), ValidArgsFunction: p.completed(1, planNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if out == "" {
				return usageErrorf("--out is missing: set it to the path of the HTML file")
			}
			if err := notEmpty(cmd, "current"); err != nil {
				return err
			}
			if err := atomicfile.Check(out); err != nil {
				return usageErrorf("--out: %w", err)
			}
			return p.report(cmd.Context(), args[0], current, out)
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "path of the HTML file; an existing file is replaced (required)")
	cmd.Flags().StringVar(&current, "current", "", "PlacementPlan to compare with (default: the plan that PLAN replaces, or the default placement)")
	_ = cmd.RegisterFlagCompletionFunc("current", p.completed(2, planNames)) // it fails only if the flag does not exist
	return cmd
}

// reportDocument is what report prints as JSON.
type reportDocument struct {
	Plan    string `json:"plan"`
	File    string `json:"file"`
	Summary string `json:"summary"`
}

func (p *program) report(ctx context.Context, name, current, out string) error {
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
		p.warn("plan %s, which PlacementPlan %s replaces, does not exist: the report compares with the default placement; select another plan with --current",
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
	if err := atomicfile.WriteBytes(out, 0o644, page.Bytes()); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	return p.write(reportDocument{of.Name, out, data.Summary()}, func() string {
		return p.style.Paragraph(terminal.Words(data.Summary(), terminal.Plain), 0) + p.style.Paragraph(terminal.Words("Written to "+out, terminal.Faint), 0)
	})
}

// promised converts the forecast and the comparison in a plan's status for the report.
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

// solved rebuilds a plan from its ConfigMap. The ConfigMap has no tables, so the result has none.
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

// replaced returns the plan to compare with: the named plan, or the plan that this one replaces. It returns nil, for
// the default placement, if this plan replaces none or the replaced plan does not exist.
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
