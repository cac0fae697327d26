package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/change"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

func (p *Program) replanCommand() *cobra.Command {
	var dryRun string
	var since time.Duration
	cmd := &cobra.Command{
		Use: "replan NAME", Short: "Make a plan for what is requested now, to replace the one in service",
		Long: "Create an AffinityProfile of what the request routers have sampled, and a PlacementPlan made from it that is compared with the one in\n" +
			"service: what the operator makes when it sees drift, without waiting for that. Nothing is rolled out: see the plan by explain, and\n" +
			"bring it into service by rollback --to.",
		Args: arguments(1, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if since < 0 {
				return usageErrorf("--since is %v; it cannot be negative", since)
			}
			return p.replan(cmd.Context(), args[0], since, dryRun)
		},
	}
	cmd.Flags().DurationVar(&since, "since", time.Hour, "how far back samples count")
	dryRunFlag(cmd, &dryRun)
	return cmd
}

// replanDocument is what replan prints as JSON.
type replanDocument struct {
	Namespace string `json:"namespace"`
	Profile   string `json:"profile"`
	Plan      string `json:"plan"`
	DryRun    bool   `json:"dryRun"`
}

func (p *Program) replan(ctx context.Context, name string, since time.Duration, dryRun string) error {
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
	serving, err := cluster.inService(ctx, moed)
	if err != nil {
		return err
	}
	profile, plan, err := change.Replan(moed, serving, p.Now().Add(-since), p.Now())
	if err != nil {
		return err
	}
	if err := cluster.tryBoth(ctx, profile, plan); err != nil {
		return err
	}
	suffix := " (server dry run: nothing is created)"
	if dryRun != "server" {
		suffix = ""
		if err := cluster.createBoth(ctx, profile, plan); err != nil {
			return err
		}
	}
	return p.write(replanDocument{moed.Namespace, profile.Name, plan.Name, dryRun == "server"}, func() string {
		text := p.style.Paragraph(terminal.Text{{Text: "AffinityProfile and PlacementPlan "}, {Text: plan.Name, Tone: terminal.Strong}, {Text: " created" + suffix}}, 0)
		for _, step := range []string{
			fmt.Sprintf("kubectl semmoe explain %s -n %s", plan.Name, moed.Namespace),
			fmt.Sprintf("kubectl semmoe rollback %s -n %s --to %s", moed.Name, moed.Namespace, plan.Name),
		} {
			text += p.style.Paragraph(terminal.Words(step, terminal.Plain), 2)
		}
		return text
	})
}

// tryBoth has the API server say what it would refuse: a profile that is created before a plan is refused would stay alone.
func (c *Cluster) tryBoth(ctx context.Context, profile *semmoev1.AffinityProfile, plan *semmoev1.PlacementPlan) error {
	for _, object := range []client.Object{profile.DeepCopy(), plan.DeepCopy()} { // what the server fills in cannot be sent again
		if err := c.Create(ctx, object, client.FieldOwner(fieldManager), client.DryRunAll); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) createBoth(ctx context.Context, profile *semmoev1.AffinityProfile, plan *semmoev1.PlacementPlan) error {
	if err := c.Create(ctx, profile, client.FieldOwner(fieldManager)); err != nil {
		return err
	}
	if err := c.Create(ctx, plan, client.FieldOwner(fieldManager)); err != nil {
		return fmt.Errorf("AffinityProfile %s is created, its plan is not; without it nothing uses the profile: kubectl delete affinityprofile %s -n %s: %w", profile.Name, profile.Name, profile.Namespace, err)
	}
	return nil
}

// inService is what a MoEDeployment serves under.
func (c *Cluster) inService(ctx context.Context, moed *semmoev1.MoEDeployment) (change.InService, error) {
	var serving change.InService
	plans, err := c.plans(ctx)
	if err != nil {
		return serving, err
	}
	find := func(is func(*semmoev1.PlacementPlan) bool) *semmoev1.PlacementPlan {
		for i := range plans {
			if is(&plans[i]) {
				return &plans[i]
			}
		}
		return nil
	}
	serving.Plan = find(func(plan *semmoev1.PlacementPlan) bool {
		return moed.Status.PlanDigest != "" && plan.Status.Plan == moed.Status.PlanDigest
	})
	if serving.Plan == nil {
		return serving, nil
	}
	serving.Reported = find(func(plan *semmoev1.PlacementPlan) bool { return plan.Name == moed.Status.Plan })
	if serving.TablesDigest, err = c.tables(ctx, moed, serving.Plan); err != nil {
		return serving, err
	}
	serving.Tables = find(func(plan *semmoev1.PlacementPlan) bool {
		return serving.TablesDigest != "" && plan.Status.PlanDigest == serving.TablesDigest
	})
	serving.Profiles, err = c.profilesOf(ctx, serving.Plans())
	return serving, err
}

// tables is the digest of the plan whose tables are used with that of a layout; empty for its own.
func (c *Cluster) tables(ctx context.Context, moed *semmoev1.MoEDeployment, layout *semmoev1.PlacementPlan) (string, error) {
	var held corev1.ConfigMap
	if err := c.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: moed.Name + "-tables"}, &held); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	var tables map[string]string
	if err := json.Unmarshal([]byte(held.Data[semmoev1.TablesKey]), &tables); err != nil {
		return "", fmt.Errorf("ConfigMap %s: %s: %w", held.Name, semmoev1.TablesKey, err)
	}
	return tables[layout.Status.PlanDigest], nil
}

// profilesOf are the profiles that plans were made from, by name, as far as they exist.
func (c *Cluster) profilesOf(ctx context.Context, plans []*semmoev1.PlacementPlan) (map[string]*semmoev1.AffinityProfile, error) {
	profiles := map[string]*semmoev1.AffinityProfile{}
	for _, plan := range plans {
		profile := &semmoev1.AffinityProfile{}
		err := c.Get(ctx, client.ObjectKey{Namespace: plan.Namespace, Name: plan.Spec.ProfileRef.Name}, profile)
		switch {
		case err == nil:
			profiles[profile.Name] = profile
		case !apierrors.IsNotFound(err):
			return nil, err
		}
	}
	return profiles, nil
}
