// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/internal/kubectl/view"
)

func (p *program) statusCommand() *cobra.Command {
	var all, watch bool
	cmd := &cobra.Command{
		Use: "status [NAME]", Short: "Show MoEDeployments and the objects that belong to them",
		Long: "Show a MoEDeployment with its profiles, plans, revisions, request routers, Jobs and conditions, and the action that it waits for.\n" +
			"Without a name, show all MoEDeployments of the namespace without conditions.",
		Example: "  kubectl semmoe status qwen3-30b --watch\n  kubectl semmoe status -A",
		Args:    arguments(0, 1), ValidArgsFunction: p.completed(1, deploymentNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all && len(args) > 0 {
				return usageErrorf("--all-namespaces cannot be combined with a name")
			}
			cluster, err := p.open()
			if err != nil {
				return err
			}
			if all {
				cluster.Namespace = ""
			}
			return p.watch(cmd.Context(), watch, func(ctx context.Context) (any, string, error) { return p.status(ctx, cluster, args) })
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "show the MoEDeployments of all namespaces")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "poll every two seconds and print each change, until Ctrl-C")
	return cmd
}

// statusDocument is what status prints as JSON.
type statusDocument struct {
	Deployments []view.Deployment `json:"deployments"`
}

// status describes the named MoEDeployment, or all of them.
func (p *program) status(ctx context.Context, cluster *Cluster, names []string) (any, string, error) {
	var moeds []semmoev1.MoEDeployment
	if len(names) > 0 {
		moed, err := cluster.deployment(ctx, names[0])
		if err != nil {
			return nil, "", err
		}
		moeds = append(moeds, *moed)
	} else {
		var list semmoev1.MoEDeploymentList
		if err := cluster.List(ctx, &list, client.InNamespace(cluster.Namespace)); err != nil {
			return nil, "", err
		}
		moeds = list.Items
	}
	document := statusDocument{Deployments: []view.Deployment{}}
	related := map[string]view.Objects{}
	var text strings.Builder
	for i := range moeds {
		moed := &moeds[i]
		if _, read := related[moed.Namespace]; !read {
			objects, err := cluster.relatedObjects(ctx, moed.Namespace)
			if err != nil {
				return nil, "", err
			}
			related[moed.Namespace] = objects
		}
		objects := related[moed.Namespace]
		objects.Deployment, objects.Now = moed, p.Now()
		d := view.Describe(objects)
		document.Deployments = append(document.Deployments, d)
		if i > 0 {
			text.WriteString("\n")
		}
		text.WriteString(d.Tree(p.style))
		if len(names) > 0 {
			text.WriteString("\n" + d.Details(p.style))
		}
		if hints := d.Hints(p.style); hints != "" {
			text.WriteString("\n" + hints)
		}
	}
	if len(moeds) == 0 {
		text.WriteString(p.style.Paragraph(terminal.Words(noDeployments(cluster.Namespace), terminal.Plain), 0))
	}
	return document, text.String(), nil
}

func noDeployments(namespace string) string {
	if namespace == "" {
		return "The cluster has no MoEDeployments."
	}
	return "Namespace " + namespace + " has no MoEDeployments. Use -A for all namespaces."
}
