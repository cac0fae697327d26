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

// deployment reads a MoEDeployment. Where there is none of the name, it says which there are.
func (c *Cluster) deployment(ctx context.Context, name string) (*semmoev1.MoEDeployment, error) {
	moed := &semmoev1.MoEDeployment{}
	err := c.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: name}, moed)
	if !apierrors.IsNotFound(err) || isMissingKind(err) {
		return moed, err
	}
	return nil, notFoundf("there is no MoEDeployment %q in namespace %s%s", name, c.Namespace, c.others(ctx, &semmoev1.MoEDeploymentList{}))
}

// others names the objects that there are; empty where that is not known.
func (c *Cluster) others(ctx context.Context, list client.ObjectList) string {
	if c.List(ctx, list, client.InNamespace(c.Namespace)) != nil {
		return ""
	}
	names := namesOf(list)
	if len(names) == 0 {
		return ", nor any other"
	}
	return ": there is " + strings.Join(names, ", ")
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

// leastDigest is how many characters of a plan's digest are enough to name it.
const leastDigest = 6

// plan finds a PlacementPlan by its name, or by the beginning of its plan's digest. Several that are one and the same plan are the newest.
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
		if len(name) >= leastDigest && strings.HasPrefix(plan.Status.PlanDigest, name) {
			found = append(found, plan)
		}
	}
	switch len(found) {
	case 0:
		return nil, notFoundf("there is no PlacementPlan in namespace %s that has the name, or whose plan's digest begins with, %q%s", c.Namespace, name, c.others(ctx, &all))
	case 1:
		return &found[0], nil
	}
	return nil, usageErrorf("%q is ambiguous: %s have plans whose digests begin so; give a name", name, strings.Join(namesOf(&semmoev1.PlacementPlanList{Items: found}), ", "))
}

// plans are those of the namespace.
func (c *Cluster) plans(ctx context.Context) ([]semmoev1.PlacementPlan, error) {
	var all semmoev1.PlacementPlanList
	err := c.List(ctx, &all, client.InNamespace(c.Namespace))
	return all.Items, err
}

// surroundings reads all that may belong to MoEDeployments of a namespace. What may not be read is left out, and said.
func (c *Cluster) surroundings(ctx context.Context, namespace string) (view.Objects, error) {
	var o view.Objects
	var profiles semmoev1.AffinityProfileList
	var plans semmoev1.PlacementPlanList
	var sets appsv1.StatefulSetList
	var groups leaderworkersetv1.LeaderWorkerSetList
	var deployments appsv1.DeploymentList
	var pods corev1.PodList
	var jobs batchv1.JobList
	for _, each := range []struct {
		what string
		list client.ObjectList
		// optional kinds may not be installed.
		optional bool
	}{
		{"AffinityProfiles", &profiles, false}, {"PlacementPlans", &plans, false}, {"StatefulSets", &sets, false},
		{"LeaderWorkerSets", &groups, true}, {"Deployments", &deployments, false}, {"Pods", &pods, false}, {"Jobs", &jobs, false},
	} {
		options := []client.ListOption{client.InNamespace(namespace)}
		if each.what != "AffinityProfiles" && each.what != "PlacementPlans" { // which users make without labels
			options = append(options, client.HasLabels{semmoev1.LabelComponent})
		}
		err := c.List(ctx, each.list, options...)
		switch {
		case apierrors.IsForbidden(err):
			o.NotRead = append(o.NotRead, fmt.Sprintf("%s, which you may not list", each.what))
		case each.optional && (meta.IsNoMatchError(err) || isMissingKind(err)):
		case err != nil:
			return o, err
		}
	}
	o.Profiles, o.Plans, o.StatefulSets, o.LeaderWorkerSets = profiles.Items, plans.Items, sets.Items, groups.Items
	o.Deployments, o.Pods, o.Jobs = deployments.Items, pods.Items, jobs.Items
	return o, nil
}

// completed completes names of one kind, as the n-th and further arguments, up to most.
func (p *Program) completed(most int, kinds ...func() client.ObjectList) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= most {
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
		return slices.DeleteFunc(namesOf(list), func(name string) bool { return !strings.HasPrefix(name, begun) }), cobra.ShellCompDirectiveNoFileComp
	}
}

func deploymentNames() client.ObjectList { return &semmoev1.MoEDeploymentList{} }
func planNames() client.ObjectList       { return &semmoev1.PlacementPlanList{} }
