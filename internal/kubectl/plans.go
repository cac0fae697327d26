// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kubectl/view"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/placement"
)

func (p *program) explainCommand() *cobra.Command {
	return &cobra.Command{
		Use: "explain PLAN", Short: "Explain the expected benefit and the state of a plan",
		Long: "Explain what a plan promises, what it was compared with, how it is rolled out, which MoEDeployments use it, and what blocks it.\n" +
			"PLAN is the name of a PlacementPlan, or a prefix (at least 6 characters) of its plan digest.",
		Args: arguments(1, 1), ValidArgsFunction: p.completed(1, planNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := p.open()
			if err != nil {
				return err
			}
			found, err := cluster.plan(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			var moeds semmoev1.MoEDeploymentList
			if err := cluster.List(cmd.Context(), &moeds, client.InNamespace(found.Namespace)); err != nil {
				return err
			}
			e := view.Explain(found, moeds.Items)
			return p.write(e, func() string { return e.Text(p.style) })
		},
	}
}

func (p *program) diffCommand() *cobra.Command {
	return &cobra.Command{
		Use: "diff PLAN PLAN", Short: "Compare two plans",
		Long: "Compare the figures of two plans, and count the experts that move from the first plan to the second, by layer and by receiving rank.\n" +
			"The placements are read from the ConfigMaps of the plans.",
		Args: arguments(2, 2), ValidArgsFunction: p.completed(2, planNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := p.open()
			if err != nil {
				return err
			}
			var sides [2]view.Side
			for i, name := range args {
				if sides[i].Plan, err = cluster.plan(cmd.Context(), name); err != nil {
					return err
				}
				layout, err := cluster.layout(cmd.Context(), sides[i].Plan)
				if err != nil {
					return err
				}
				sides[i].Placement = layout.Placement
			}
			bytes, err := cluster.expertBytes(cmd.Context(), sides[1])
			if err != nil {
				return err
			}
			d, err := view.Diff(sides[0], sides[1], bytes)
			if err != nil {
				return codedError{err, exitState}
			}
			return p.write(d, func() string { return d.Text(p.style) })
		},
	}
}

// layout is the content of the ConfigMap of a plan.
type layout struct {
	Manifest  plan.Manifest
	Placement *placement.Placement
}

// layout reads the ConfigMap of a plan and verifies its digests.
func (c *Cluster) layout(ctx context.Context, of *semmoev1.PlacementPlan) (*layout, error) {
	if of.Status.ConfigMap == "" {
		return nil, codedError{fmt.Errorf("PlacementPlan %s is not published yet: run kubectl semmoe explain %s", of.Name, of.Name), exitState}
	}
	var configMap corev1.ConfigMap
	err := c.Get(ctx, client.ObjectKey{Namespace: of.Namespace, Name: of.Status.ConfigMap}, &configMap)
	if apierrors.IsNotFound(err) {
		return nil, notFoundf("ConfigMap %s of PlacementPlan %s does not exist: the operator recreates it; retry later", of.Status.ConfigMap, of.Name)
	}
	if err != nil {
		return nil, err
	}
	l := &layout{Placement: &placement.Placement{}}
	if err := decode(&configMap, plan.ManifestFile, of.Status.PlanDigest, &l.Manifest); err != nil {
		return nil, err
	}
	if err := decode(&configMap, plan.PlacementFile, l.Manifest.Files[plan.PlacementFile], l.Placement); err != nil {
		return nil, err
	}
	if err := l.Placement.Validate(); err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %s: %w", configMap.Name, plan.PlacementFile, err)
	}
	return l, nil
}

// decode verifies the SHA-256 digest of a key of a ConfigMap and decodes its JSON.
func decode(configMap *corev1.ConfigMap, file, digest string, into any) error {
	text := configMap.Data[file]
	if got, _, err := artifact.DigestOf(strings.NewReader(text)); err != nil || string(got) != digest {
		return fmt.Errorf("ConfigMap %s: %s is damaged: its sha256 is %s, the plan has %s", configMap.Name, file, got, digest)
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return fmt.Errorf("ConfigMap %s: %s: %w", configMap.Name, file, err)
	}
	return nil
}

// expertBytes returns an upper bound of the bytes of one expert's weights: the bytes of the checkpoint, as reported by
// an inspection Job, divided by the number of experts. It is 0 if no inspection Job of the model is left.
func (c *Cluster) expertBytes(ctx context.Context, side view.Side) (int64, error) {
	var jobs batchv1.JobList
	err := c.List(ctx, &jobs, client.InNamespace(side.Plan.Namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentInspect})
	if apierrors.IsForbidden(err) {
		return 0, nil
	}
	for _, job := range jobs.Items {
		var report checkpoint.Report
		valid := json.Unmarshal([]byte(job.Annotations[semmoev1.AnnotationReport]), &report) == nil
		if experts := int64(len(report.MoELayers)) * int64(report.Experts); valid && report.ModelDigest == side.Plan.Status.ModelDigest && experts > 0 {
			return report.Bytes / experts, nil
		}
	}
	return 0, err
}
