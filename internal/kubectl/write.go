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

// dryRunFlag adds --dry-run, and returns a check of its value.
func dryRunFlag(cmd *cobra.Command, dryRun *string) {
	cmd.Flags().StringVar(dryRun, "dry-run", "none", "none, or server: the API server checks the change, and does not keep it")
}

func checkDryRun(dryRun string) error {
	if dryRun != "none" && dryRun != "server" {
		return usageErrorf("--dry-run is %q; allowed is none, server", dryRun)
	}
	return nil
}

// decision is what a command changes of a MoEDeployment.
type decision func(ctx context.Context, cluster *Cluster, moed *semmoev1.MoEDeployment) (change.Change, error)

// changeDeployment reads the MoEDeployment, decides, and writes.
func (p *Program) changeDeployment(ctx context.Context, name, dryRun string, decide decision) error {
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

// changeDocument is what commands that change something print as JSON.
type changeDocument struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Changed is false where it was so already.
	Changed bool           `json:"changed"`
	DryRun  bool           `json:"dryRun"`
	Patch   map[string]any `json:"patch,omitempty"`
	Message string         `json:"message"`
	// RevertedBy is the tool that may change it back.
	RevertedBy *gitops.Owner `json:"revertedBy,omitempty"`
}

// apply writes a change, and tells it.
func (p *Program) apply(ctx context.Context, cluster *Cluster, moed *semmoev1.MoEDeployment, c change.Change, dryRun bool) error {
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
		suffix = " (it was so already)"
	case dryRun:
		suffix = " (server dry run: nothing is changed)"
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

func (p *Program) approveCommand() *cobra.Command {
	var dryRun string
	cmd := &cobra.Command{
		Use: "approve NAME [PLAN]", Short: "Let a plan that waits for somebody's word be rolled out",
		Long: "Let a plan be rolled out that waits for approval: with spec.placement.approval Manual, where its roll-out interrupts the service,\n" +
			"or where nothing tells whether it is better. Without PLAN it is the one that waits. It sets the annotation semmoe.io/approve.",
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

func (p *Program) rollbackCommand() *cobra.Command {
	var to, dryRun string
	var unpin bool
	cmd := &cobra.Command{
		Use: "rollback NAME [--to PLAN | --unpin]", Short: "Take back a plan that is on trial, or go back to another one",
		Long: "Take back the plan that is on its canary or being promoted: the PlacementPlan gets the annotation failed.semmoe.io/<revision>, and is\n" +
			"not tried again while it has it. With --to, go back to an earlier plan: spec.placement.planRef pins it, and no drift replaces it until\n" +
			"--unpin.",
		Example: "  kubectl semmoe rollback qwen3-30b\n  kubectl semmoe rollback qwen3-30b --to qwen3-30b-0b7d9a11",
		Args:    arguments(1, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to != "" && unpin {
				return usageErrorf("--to and --unpin exclude each other: one pins a plan, the other none")
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
				return change.TakeBack(moed, plans, "TakenBack: by kubectl semmoe rollback")
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "PlacementPlan to go back to, by its name or the beginning of its plan's digest")
	cmd.Flags().BoolVar(&unpin, "unpin", false, "let the operator choose the plan again")
	_ = cmd.RegisterFlagCompletionFunc("to", p.completed(2, planNames)) // it fails for flags that are not there alone
	dryRunFlag(cmd, &dryRun)
	return cmd
}

func (p *Program) pauseCommand() *cobra.Command {
	return p.reconciliationCommand("pause", semmoev1.ReconciliationPaused, "Begin no profile, plan or roll-out until resumed; repair and serving go on")
}

func (p *Program) resumeCommand() *cobra.Command {
	return p.reconciliationCommand("resume", semmoev1.ReconciliationActive, "Let profiles, plans and roll-outs begin again")
}

func (p *Program) reconciliationCommand(verb string, mode semmoev1.ReconciliationMode, short string) *cobra.Command {
	var dryRun string
	cmd := &cobra.Command{
		Use: verb + " NAME", Short: short, Long: fmt.Sprintf("%s.\nIt sets spec.reconciliation to %s.", short, mode),
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
