// SPDX-License-Identifier: Apache-2.0

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

func (p *program) replanCommand() *cobra.Command {
	var dryRun string
	var since time.Duration
	cmd := &cobra.Command{
		Use: "replan NAME", Short: "Create a plan for the current traffic, to replace the plan in service",
		Long: "Create an AffinityProfile from the requests that the routers sampled, and a PlacementPlan that is compared with the plan in service.\n" +
			"The operator creates the same objects when it detects drift. Nothing is rolled out: review the plan with kubectl semmoe explain,\n" +
			"and use it with kubectl semmoe rollback --to.",
		Args: arguments(1, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if since < 0 {
				return usageErrorf("--since: %v is invalid: it must not be negative", since)
			}
			return p.replan(cmd.Context(), args[0], since, dryRun)
		},
	}
	cmd.Flags().DurationVar(&since, "since", time.Hour, "maximum age of the samples to use")
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

func (p *program) replan(ctx context.Context, name string, since time.Duration, dryRun string) error {
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

// tryBoth creates both objects in a dry run. Without it, a plan that the API server rejects would leave a profile that
// nothing uses.
func (c *Cluster) tryBoth(ctx context.Context, profile *semmoev1.AffinityProfile, plan *semmoev1.PlacementPlan) error {
	for _, object := range []client.Object{profile.DeepCopy(), plan.DeepCopy()} { // Create fills in fields that a second Create must not contain
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
		return fmt.Errorf("failed to create the PlacementPlan of AffinityProfile %s; delete the unused profile with kubectl delete affinityprofile %s -n %s: %w", profile.Name, profile.Name, profile.Namespace, err)
	}
	return nil
}

// inService finds the plans that a MoEDeployment serves with, and their profiles.
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

// tables returns the digest of the plan that provides the tables for a layout. It is empty if the layout uses the
// tables of its own plan.
func (c *Cluster) tables(ctx context.Context, moed *semmoev1.MoEDeployment, layout *semmoev1.PlacementPlan) (string, error) {
	var configMap corev1.ConfigMap
	if err := c.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: moed.Name + "-tables"}, &configMap); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	var tables map[string]string
	if err := json.Unmarshal([]byte(configMap.Data[semmoev1.TablesKey]), &tables); err != nil {
		return "", fmt.Errorf("ConfigMap %s: %s: %w", configMap.Name, semmoev1.TablesKey, err)
	}
	return tables[layout.Status.PlanDigest], nil
}

// profilesOf returns the existing profiles of plans, by name. Deleted profiles are absent.
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
