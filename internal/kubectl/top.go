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
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/kubectl/view"
	"github.com/semmoe/operator/internal/podhealth"
)

func (p *Program) topCommand() *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use: "top [NAME]", Short: "Show the local activation rate, and the load of each rank",
		Long: "Show the local activation rate of sampled requests, and how the tokens of all requests are spread over the ranks, as the metrics of the\n" +
			"request routers tell: of all since they started, and with --watch of those since the last look. They are read through the API server\n" +
			"(pods/proxy); without that right it shows what the operator has reported last.",
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
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "show it again every two seconds, until Ctrl-C")
	return cmd
}

// topDocument is what top prints as JSON.
type topDocument struct {
	Deployments []view.Load `json:"deployments"`
}

// history is what a deployment's request routers have told so far.
type history struct {
	// pods are those of the look before, last is what each of them has told last.
	pods []string
	last map[string]view.Routed
}

// with adds the pods of a look. One that was not there at the look before has begun since; one that was, and has told nothing yet, may
// have begun long ago.
func (h history) with(pods []string) history {
	last := map[string]view.Routed{}
	for _, pod := range pods {
		if told, known := h.last[pod]; known || len(h.pods) > 0 && !slices.Contains(h.pods, pod) {
			last[pod] = told
		}
	}
	return history{pods, last}
}

// top tells the load of the named MoEDeployment, or of all. before is what routers told at the looks before, and is renewed.
func (p *Program) top(ctx context.Context, cluster *Cluster, names []string, before map[string]history) (any, string, error) {
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
		pods, told, notes, err := cluster.routed(ctx, moed)
		if err != nil {
			return nil, "", err
		}
		known := before[moed.Name].with(pods)
		load := view.Top(moed, told, known.last, notes)
		maps.Copy(known.last, told)
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

// routed names the pods of a deployment's request routers, and reads their metrics, by pod. What cannot be read is noted.
func (c *Cluster) routed(ctx context.Context, moed *semmoev1.MoEDeployment) (pods []string, told map[string]view.Routed, notes []string, err error) {
	told = map[string]view.Routed{}
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeNone {
		return nil, told, []string{"spec.routing.mode is None: no request router tells anything."}, nil
	}
	var list corev1.PodList
	err = c.List(ctx, &list, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentRouter})
	if apierrors.IsForbidden(err) {
		return nil, told, []string{"You may not list pods: this is what the operator has reported last."}, nil
	}
	if err != nil {
		return nil, nil, nil, err
	}
	for i := range list.Items {
		pod := &list.Items[i]
		pods = append(pods, pod.Name)
		if !podhealth.Ready(pod) {
			notes = append(notes, fmt.Sprintf("Pod %s is not ready, and left out.", pod.Name))
			continue
		}
		text, err := c.Metrics(ctx, pod)
		if apierrors.IsForbidden(err) {
			return nil, map[string]view.Routed{}, []string{"You may not read the routers' metrics (get pods/proxy): this is what the operator has reported last."}, nil
		}
		var routed view.Routed
		if err == nil {
			routed, err = view.ParseMetrics(text)
		}
		if err != nil {
			notes = append(notes, fmt.Sprintf("Pod %s is left out: %v.", pod.Name, err))
			continue
		}
		told[pod.Name] = routed
	}
	if len(told) == 0 {
		notes = append(notes, "No request router tells anything: this is what the operator has reported last. Where network policies are enforced, the API server may not reach their metrics.")
	}
	return pods, told, notes, nil
}
