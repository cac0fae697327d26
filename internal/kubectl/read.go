// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/view"
)

// deployment reads a MoEDeployment. If there is none of that name, the error lists the existing names.
func (c *Cluster) deployment(ctx context.Context, name string) (*semmoev1.MoEDeployment, error) {
	moed := &semmoev1.MoEDeployment{}
	err := c.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: name}, moed)
	if !apierrors.IsNotFound(err) || isMissingKind(err) {
		return moed, err
	}
	return nil, notFoundf("MoEDeployment %q does not exist in namespace %s%s", name, c.Namespace, c.others(ctx, &semmoev1.MoEDeploymentList{}))
}

// others returns a suffix for an error that lists the existing objects. It is empty if they cannot be listed.
func (c *Cluster) others(ctx context.Context, list client.ObjectList) string {
	if c.List(ctx, list, client.InNamespace(c.Namespace)) != nil {
		return ""
	}
	names := namesOf(list)
	if len(names) == 0 {
		return " (there are none)"
	}
	return " (existing: " + strings.Join(names, ", ") + ")"
}

func namesOf(list client.ObjectList) []string {
	var names []string
	items, err := meta.ExtractList(list)
	if err != nil {
		return nil
	}
	for _, item := range items {
		if object, ok := item.(client.Object); ok {
			names = append(names, object.GetName())
		}
	}
	slices.Sort(names)
	return names
}

// minDigestPrefix is the minimum length of a digest prefix that identifies a plan, in characters.
const minDigestPrefix = 6

// plan finds a PlacementPlan by its name, or by a prefix of its plan digest. A prefix that matches several objects is
// an error.
func (c *Cluster) plan(ctx context.Context, name string) (*semmoev1.PlacementPlan, error) {
	plan := &semmoev1.PlacementPlan{}
	err := c.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: name}, plan)
	if !apierrors.IsNotFound(err) || isMissingKind(err) {
		return plan, err
	}
	var all semmoev1.PlacementPlanList
	if err := c.List(ctx, &all, client.InNamespace(c.Namespace)); err != nil {
		return nil, err
	}
	var found []semmoev1.PlacementPlan
	for _, plan := range all.Items {
		if len(name) >= minDigestPrefix && strings.HasPrefix(plan.Status.PlanDigest, name) {
			found = append(found, plan)
		}
	}
	switch len(found) {
	case 0:
		return nil, notFoundf("no PlacementPlan in namespace %s has the name or the digest prefix %q%s", c.Namespace, name, c.others(ctx, &all))
	case 1:
		return &found[0], nil
	}
	return nil, usageErrorf("%q is ambiguous: it is a digest prefix of the plans %s; use a name", name, strings.Join(namesOf(&semmoev1.PlacementPlanList{Items: found}), ", "))
}

// plans lists the PlacementPlans of the namespace.
func (c *Cluster) plans(ctx context.Context) ([]semmoev1.PlacementPlan, error) {
	var all semmoev1.PlacementPlanList
	err := c.List(ctx, &all, client.InNamespace(c.Namespace))
	return all.Items, err
}

// relatedObjects lists the objects of a namespace that may belong to its MoEDeployments. Kinds that the user may not
// list are skipped and named in NotRead.
func (c *Cluster) relatedObjects(ctx context.Context, namespace string) (view.Objects, error) {
	var o view.Objects
	var profiles semmoev1.AffinityProfileList
	var plans semmoev1.PlacementPlanList
	var sets appsv1.StatefulSetList
	var groups leaderworkersetv1.LeaderWorkerSetList
	var deployments appsv1.DeploymentList
	var pods corev1.PodList
	var jobs batchv1.JobList
	for _, each := range []struct {
		kinds string
		list  client.ObjectList
		// optional kinds may not be installed.
		optional bool
	}{
		{"AffinityProfiles", &profiles, false}, {"PlacementPlans", &plans, false}, {"StatefulSets", &sets, false},
		{"LeaderWorkerSets", &groups, true}, {"Deployments", &deployments, false}, {"Pods", &pods, false}, {"Jobs", &jobs, false},
	} {
		options := []client.ListOption{client.InNamespace(namespace)}
		if each.kinds != "AffinityProfiles" && each.kinds != "PlacementPlans" { // users create these two kinds without the label
			options = append(options, client.HasLabels{semmoev1.LabelComponent})
		}
		err := c.List(ctx, each.list, options...)
		switch {
		case apierrors.IsForbidden(err):
			o.NotRead = append(o.NotRead, fmt.Sprintf("%s (no permission to list them)", each.kinds))
		case each.optional && (meta.IsNoMatchError(err) || isMissingKind(err)):
		case err != nil:
			return o, err
		}
	}
	o.Profiles, o.Plans, o.StatefulSets, o.LeaderWorkerSets = profiles.Items, plans.Items, sets.Items, groups.Items
	o.Deployments, o.Pods, o.Jobs = deployments.Items, pods.Items, jobs.Items
	return o, nil
}

// completed completes the names of objects for at most maxArgs arguments. kinds[i] is the kind of the i-th argument.
// The last kind is also used for all further arguments.
func (p *program) completed(maxArgs int, kinds ...func() client.ObjectList) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= maxArgs {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		cluster, err := p.open()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		list := kinds[min(len(args), len(kinds)-1)]()
		if err := cluster.List(cmd.Context(), list, client.InNamespace(cluster.Namespace)); err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return slices.DeleteFunc(namesOf(list), func(name string) bool { return !strings.HasPrefix(name, prefix) }), cobra.ShellCompDirectiveNoFileComp
	}
}

func deploymentNames() client.ObjectList { return &semmoev1.MoEDeploymentList{} }
func planNames() client.ObjectList       { return &semmoev1.PlacementPlanList{} }
