// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/kubectl/view"
)

func (p *program) topCommand() *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use: "top [NAME]", Short: "Show the local activation rate (LAR) and the load of each rank",
		Long: "Show the local activation rate (LAR) of sampled requests, and the distribution of the tokens of all requests over the ranks. The figures\n" +
			"are read from the metrics of the request routers through the API server (pods/proxy). They cover the time since the routers started,\n" +
			"and with --watch the time since the last poll. Without the permission for pods/proxy, the last status that the operator reported is shown.",
		Args: arguments(0, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := p.open()
			if err != nil {
				return err
			}
			before := map[string]history{}
			return p.watch(cmd.Context(), watch, func(ctx context.Context) (any, string, error) { return p.top(ctx, cluster, args, before) })
		},
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "poll every two seconds, until Ctrl-C")
	return cmd
}

// topDocument is what top prints as JSON.
type topDocument struct {
	Deployments []view.Load `json:"deployments"`
}

// history holds the metrics of a deployment's request routers at earlier polls.
type history struct {
	// pods are the router pods of the previous poll. last holds the latest metrics of each pod.
	pods []string
	last map[string]view.RouterMetrics
}

// with returns the history for the pods of a new poll. A pod that did not exist at the previous poll counts from zero.
// A pod that existed, but whose metrics were never read, is left out: it may have started long ago.
func (h history) with(pods []string) history {
	last := map[string]view.RouterMetrics{}
	for _, pod := range pods {
		if metrics, known := h.last[pod]; known || len(h.pods) > 0 && !slices.Contains(h.pods, pod) {
			last[pod] = metrics
		}
	}
	return history{pods, last}
}

// top describes the load of the named MoEDeployment, or of all of them. before holds the metrics of earlier polls. top
// updates it.
func (p *program) top(ctx context.Context, cluster *Cluster, names []string, before map[string]history) (any, string, error) {
	var list semmoev1.MoEDeploymentList
	if len(names) > 0 {
		moed, err := cluster.deployment(ctx, names[0])
		if err != nil {
			return nil, "", err
		}
		list.Items = append(list.Items, *moed)
	} else if err := cluster.List(ctx, &list, client.InNamespace(cluster.Namespace)); err != nil {
		return nil, "", err
	}
	document := topDocument{Deployments: []view.Load{}}
	var text strings.Builder
	for i := range list.Items {
		moed := &list.Items[i]
		pods, metrics, notes, err := cluster.routerMetrics(ctx, moed)
		if err != nil {
			return nil, "", err
		}
		known := before[moed.Name].with(pods)
		load := view.Top(moed, metrics, known.last, notes)
		maps.Copy(known.last, metrics)
		before[moed.Name] = known
		document.Deployments = append(document.Deployments, load)
		if i > 0 {
			text.WriteString("\n")
		}
		text.WriteString(load.Text(p.style))
	}
	if len(list.Items) == 0 {
		text.WriteString(p.style.Paragraph(terminal.Words(noDeployments(cluster.Namespace), terminal.Plain), 0))
	}
	return document, text.String(), nil
}

// routerMetrics returns the names of a deployment's router pods, and their metrics by pod. A note explains each pod whose
// metrics cannot be read.
func (c *Cluster) routerMetrics(ctx context.Context, moed *semmoev1.MoEDeployment) (pods []string, metrics map[string]view.RouterMetrics, notes []string, err error) {
	metrics = map[string]view.RouterMetrics{}
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeNone {
		return nil, metrics, []string{"spec.routing.mode is None: there are no request routers to read metrics from."}, nil
	}
	var list corev1.PodList
	err = c.List(ctx, &list, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentRouter})
	if apierrors.IsForbidden(err) {
		return nil, metrics, []string{"No permission to list pods. The figures are the last status that the operator reported."}, nil
	}
	if err != nil {
		return nil, nil, nil, err
	}
	for i := range list.Items {
		pod := &list.Items[i]
		pods = append(pods, pod.Name)
		if !podhealth.Ready(pod) {
			notes = append(notes, fmt.Sprintf("Pod %s is not ready and is not counted.", pod.Name))
			continue
		}
		text, err := c.Metrics(ctx, pod)
		if apierrors.IsForbidden(err) {
			return nil, map[string]view.RouterMetrics{}, []string{"No permission to read the routers' metrics (get pods/proxy). The figures are the last status that the operator reported."}, nil
		}
		var routed view.RouterMetrics
		if err == nil {
			routed, err = view.ParseMetrics(text)
		}
		if err != nil {
			notes = append(notes, fmt.Sprintf("Pod %s is not counted: %v.", pod.Name, err))
			continue
		}
		metrics[pod.Name] = routed
	}
	if len(metrics) == 0 {
		notes = append(notes, "No router metrics could be read. The figures are the last status that the operator reported. A network policy may block the API server.")
	}
	return pods, metrics, notes, nil
}
