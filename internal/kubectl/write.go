// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/change"
	"github.com/semmoe/operator/internal/kubectl/gitops"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// dryRunFlag adds the flag --dry-run. checkDryRun validates its value.
func dryRunFlag(cmd *cobra.Command, dryRun *string) {
	cmd.Flags().StringVar(dryRun, "dry-run", "none", "none, or server (the API server validates the change and does not store it)")
}

func checkDryRun(dryRun string) error {
	if dryRun != "none" && dryRun != "server" {
		return usageErrorf("--dry-run: %q is invalid: allowed are none, server", dryRun)
	}
	return nil
}

// decision computes the change of a command from a MoEDeployment.
type decision func(ctx context.Context, cluster *Cluster, moed *semmoev1.MoEDeployment) (change.Change, error)

// changeDeployment reads the MoEDeployment, computes the change, and writes it.
func (p *program) changeDeployment(ctx context.Context, name, dryRun string, decide decision) error {
	if err := checkDryRun(dryRun); err != nil {
		return err
	}
	cluster, err := p.open()
	if err != nil {
		return err
	}
	moed, err := cluster.deployment(ctx, name)
	if err != nil {
		return err
	}
	c, err := decide(ctx, cluster, moed)
	if err != nil {
		return err
	}
	return p.apply(ctx, cluster, moed, c, dryRun == "server")
}

// changeDocument is the JSON output of commands that change an object.
type changeDocument struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Changed is false if the object already had the requested state.
	Changed bool           `json:"changed"`
	DryRun  bool           `json:"dryRun"`
	Patch   map[string]any `json:"patch,omitempty"`
	Message string         `json:"message"`
	// RevertedBy is the GitOps tool that may revert the change.
	RevertedBy *gitops.Owner `json:"revertedBy,omitempty"`
}

// apply writes a change and prints the result.
func (p *program) apply(ctx context.Context, cluster *Cluster, moed *semmoev1.MoEDeployment, c change.Change, dryRun bool) error {
	document := changeDocument{Kind: c.Kind, Namespace: moed.Namespace, Name: c.Name, Changed: c.Patch != nil, DryRun: dryRun, Patch: c.Patch, Message: c.Done}
	if c.Patch != nil {
		if err := cluster.patch(ctx, moed.Namespace, c, dryRun); err != nil {
			return err
		}
		if owner := gitops.OwnerOf(moed); owner != nil && c.Declared != "" {
			document.RevertedBy = owner
			p.warn("%s", owner.Warning(c.Kind, c.Name, c.Declared))
		}
	}
	suffix := ""
	switch {
	case c.Patch == nil:
		suffix = " (unchanged)"
	case dryRun:
		suffix = " (server dry run)"
	}
	return p.write(document, func() string {
		return p.style.Paragraph(terminal.Text{{Text: c.Kind + " "}, {Text: c.Name, Tone: terminal.Strong}, {Text: fmt.Sprintf(" %s%s", c.Done, suffix)}}, 0)
	})
}

// patch writes a change as a merge patch.
func (c *Cluster) patch(ctx context.Context, namespace string, ch change.Change, dryRun bool) error {
	body, err := json.Marshal(ch.Patch)
	if err != nil {
		return err
	}
	meta := metav1.ObjectMeta{Namespace: namespace, Name: ch.Name}
	var object client.Object = &semmoev1.MoEDeployment{ObjectMeta: meta}
	if ch.Kind == "PlacementPlan" {
		object = &semmoev1.PlacementPlan{ObjectMeta: meta}
	}
	options := []client.PatchOption{client.FieldOwner(fieldManager)}
	if dryRun {
		options = append(options, client.DryRunAll)
	}
	return c.Patch(ctx, object, client.RawPatch(types.MergePatchType, body), options...)
}

func (p *program) approveCommand() *cobra.Command {
	var dryRun string
	cmd := &cobra.Command{
		Use: "approve NAME [PLAN]", Short: "Approve a pending plan",
		Long: "Approve a plan that waits for approval: because spec.placement.approval is Manual, because its rollout interrupts the service, or\n" +
			"because the canary comparison is inconclusive. Without PLAN, approve the pending plan. The command sets the annotation semmoe.io/approve.",
		Args: arguments(1, 2), ValidArgsFunction: p.completed(2, deploymentNames, planNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.changeDeployment(cmd.Context(), args[0], dryRun, func(ctx context.Context, cluster *Cluster, moed *semmoev1.MoEDeployment) (change.Change, error) {
				if len(args) > 1 {
					plan, err := cluster.plan(ctx, args[1])
					if err != nil {
						return change.Change{}, err
					}
					return change.Approve(moed, nil, plan)
				}
				plans, err := cluster.plans(ctx)
				if err != nil {
					return change.Change{}, err
				}
				return change.Approve(moed, plans, nil)
			})
		},
	}
	dryRunFlag(cmd, &dryRun)
	return cmd
}

func (p *program) rollbackCommand() *cobra.Command {
	var to, dryRun string
	var unpin bool
	cmd := &cobra.Command{
		Use: "rollback NAME [--to PLAN | --unpin]", Short: "Roll back a plan that is being rolled out, or return to another plan",
		Long: "Roll back the plan whose canary or promotion is in progress. The PlacementPlan gets the annotation failed.semmoe.io/<revision>, and is\n" +
			"not tried again while the annotation exists. With --to, return to another plan: spec.placement.planRef pins it, and drift does not\n" +
			"replace it until --unpin.",
		Example: "  kubectl semmoe rollback qwen3-30b\n  kubectl semmoe rollback qwen3-30b --to qwen3-30b-0b7d9a11",
		Args:    arguments(1, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to != "" && unpin {
				return usageErrorf("--to and --unpin cannot be combined")
			}
			if err := notEmpty(cmd, "to"); err != nil {
				return err
			}
			return p.changeDeployment(cmd.Context(), args[0], dryRun, func(ctx context.Context, cluster *Cluster, moed *semmoev1.MoEDeployment) (change.Change, error) {
				switch {
				case unpin:
					return change.Unpin(moed), nil
				case to != "":
					plan, err := cluster.plan(ctx, to)
					if err != nil {
						return change.Change{}, err
					}
					return change.Pin(moed, plan)
				}
				plans, err := cluster.plans(ctx)
				if err != nil {
					return change.Change{}, err
				}
				return change.RollBack(moed, plans, "RolledBack: requested with kubectl semmoe rollback")
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "PlacementPlan to return to: its name, or a prefix of its plan digest")
	cmd.Flags().BoolVar(&unpin, "unpin", false, "remove the pin, so that the operator selects the plan")
	_ = cmd.RegisterFlagCompletionFunc("to", p.completed(2, planNames)) // it fails only if the flag does not exist
	dryRunFlag(cmd, &dryRun)
	return cmd
}

func (p *program) pauseCommand() *cobra.Command {
	return p.reconciliationCommand("pause", semmoev1.ReconciliationPaused, "Pause new profiles, plans and rollouts; repair and serving continue")
}

func (p *program) resumeCommand() *cobra.Command {
	return p.reconciliationCommand("resume", semmoev1.ReconciliationActive, "Resume profiles, plans and rollouts")
}

func (p *program) reconciliationCommand(verb string, mode semmoev1.ReconciliationMode, short string) *cobra.Command {
	var dryRun string
	cmd := &cobra.Command{
		Use: verb + " NAME", Short: short, Long: fmt.Sprintf("%s.\nThe command sets spec.reconciliation to %s.", short, mode),
		Args: arguments(1, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.changeDeployment(cmd.Context(), args[0], dryRun, func(_ context.Context, _ *Cluster, moed *semmoev1.MoEDeployment) (change.Change, error) {
				return change.SetReconciliation(moed, mode), nil
			})
		},
	}
	dryRunFlag(cmd, &dryRun)
	return cmd
}
