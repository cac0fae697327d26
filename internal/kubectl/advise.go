// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/kubectl/advice"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/plan/overlap"
)

func (p *program) adviseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "advise NAME", Short: "Recommend settings that the plan's models find faster",
		Long: "Compare engine settings by the models in the plan of a MoEDeployment, at the batch sizes that its engines report, and print the better\n" +
			"ones with their modelled effect. Only settings that the engine's release supports are recommended. Nothing is changed. With -o yaml or\n" +
			"-o patch, print a merge patch: kubectl patch moed NAME --type merge --patch-file FILE.",
		Args: arguments(1, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := p.open()
			if err != nil {
				return err
			}
			in, err := cluster.adviceInput(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			a := advice.Of(*in)
			if p.output == "yaml" || p.output == "patch" {
				return p.writePatch(a)
			}
			return p.write(a, func() string { return a.Text(p.style) })
		},
	}
}

// adviceInput reads a MoEDeployment and the models of its plan: the plan in service, or else the plan in its status.
func (c *Cluster) adviceInput(ctx context.Context, name string) (*advice.Input, error) {
	moed, err := c.deployment(ctx, name)
	if err != nil {
		return nil, err
	}
	plans, err := c.plans(ctx)
	if err != nil {
		return nil, err
	}
	of := modelledPlan(moed, plans)
	if of == nil {
		return nil, codedError{fmt.Errorf("MoEDeployment %s has no published plan, whose models the advice needs: see the condition Planned with kubectl semmoe status %s", name, name), exitState}
	}
	l, err := c.layout(ctx, of)
	if err != nil {
		return nil, err
	}
	in := &advice.Input{Moed: moed, ShortDigest: of.Status.Plan, Copies: l.Manifest.Copies}
	if of.Status.Forecast != nil {
		in.BatchTokens = of.Status.Forecast.BatchTokens
	}
	var configMap corev1.ConfigMap
	if err := c.Get(ctx, client.ObjectKey{Namespace: of.Namespace, Name: of.Status.ConfigMap}, &configMap); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	if in.Model, err = overlap.Read(configMap.Data, of.Status.PlanDigest); err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %w", configMap.Name, err)
	}
	return in, nil
}

// modelledPlan returns the published plan in service, or else the published plan in the status; nil if there is none.
func modelledPlan(moed *semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan) *semmoev1.PlacementPlan {
	var wanted *semmoev1.PlacementPlan
	for i := range plans {
		switch {
		case plans[i].Status.ConfigMap == "":
		case moed.Status.PlanDigest != "" && plans[i].Status.Plan == moed.Status.PlanDigest:
			return &plans[i]
		case plans[i].Name == moed.Status.Plan:
			wanted = &plans[i]
		}
	}
	return wanted
}

// writePatch prints the merge patch as YAML, with the result in comments. The patch is empty if no change is advised.
func (p *program) writePatch(a advice.Advice) error {
	var text strings.Builder
	for _, line := range strings.Split(strings.TrimSpace(a.Text(terminal.Style{})), "\n") {
		text.WriteString(strings.TrimRight("# "+line, " ") + "\n")
	}
	body := []byte("{}\n")
	if a.Patch != nil {
		var err error
		if body, err = yaml.Marshal(a.Patch); err != nil {
			return err
		}
	}
	text.Write(body)
	_, err := io.WriteString(printable.JSON(p.Out), text.String())
	return err
}
