// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/faults"
)

// story is a sequence of user actions in a namespace in which a manager runs, up to its expected end. Every hazard is
// tested on every story. To add a story, add an entry to stories.
type story struct {
	name string
	run  func(t *testing.T, namespace string)
	// needs prepares the cluster; may be nil.
	needs func(t *testing.T)
	// profilingJobs is the number of profiling Jobs that the story creates.
	profilingJobs int
	// names maps the names in the namespace that differ between runs to names that do not; may be nil.
	names func(t *testing.T, namespace string) map[string]string
}

// longestStory is the story that includes profiling, planning, rollout, routing, observation and re-planning.
const longestStory = "re-planning"

var stories = []story{
	{name: "serving", run: serving},
	{name: "planning", run: planning, profilingJobs: 1},
	{name: "switching", run: switching, needs: installInferencePools},
	{name: "promoting", run: promoting},
	{name: "rolling back", run: rollingBack},
	{name: "comparing", run: comparing},
	{name: "breaking", run: breaking},
	{name: "pinning", run: pinning},
	{name: longestStory, run: replanning, names: sampledNames},
}

// ending returns the end state of the story, with names that are equal in all runs.
func (s story) ending(t *testing.T, namespace string) map[string]string {
	t.Helper()
	return s.renamed(t, namespace, endState(t, namespace))
}

// renamed replaces the names in a state or journal that differ between runs.
func (s story) renamed(t *testing.T, namespace string, state map[string]string) map[string]string {
	t.Helper()
	if s.names == nil {
		return state
	}
	return faults.Rename(state, s.names(t, namespace))
}

// serving is a story: a deployment comes into service, a change is rolled out, and the deployment is scaled.
func serving(t *testing.T, namespace string) {
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	waitComplete(t, moed)
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = []corev1.EnvVar{{Name: "CHANGED", Value: "yes"}} })
	eventually(t, waitTimeout, "the change is rolled out", func() error {
		if workloads := listWorkloads(t, moed); len(workloads) != 1 || len(workloads[0].Spec.Template.Spec.Containers[0].Env) != 2 {
			return fmt.Errorf("%d workloads", len(workloads))
		}
		return complete(get(t, moed))
	})
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](1) })
	eventually(t, waitTimeout, "the deployment is scaled down", func() error {
		if pods := listEnginePods(t, moed); len(pods) != 1 {
			return fmt.Errorf("%d pods", len(pods))
		}
		return complete(get(t, moed))
	})
}

// planning is a story: a running deployment is profiled, planned, and the plan rolled out.
func planning(t *testing.T, namespace string) {
	create(t, dataset(t, namespace, 4))
	moed := profiledDeployment(namespace)
	create(t, moed)
	waitPlanned(t, moed)
}

// switching is a story: the routing mode changes through all modes and back.
func switching(t *testing.T, namespace string) {
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	waitComplete(t, moed)
	mode := func(mode semmoev1.RoutingMode) {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = mode })
	}
	mode(semmoev1.RoutingModeEndpointPicker)
	eventually(t, waitTimeout, "the InferencePool exists", func() error {
		_, err := getPool(t.Context(), moed)
		return err
	})
	mode(semmoev1.RoutingModeNone)
	eventually(t, waitTimeout, "the router and its objects are deleted", func() error {
		var left []error
		for _, kind := range []client.Object{
			&appsv1.Deployment{}, &networkingv1.NetworkPolicy{}, &policyv1.PodDisruptionBudget{}, &rbacv1.RoleBinding{}, &corev1.ServiceAccount{},
		} {
			left = append(left, absent(t.Context(), kind, namespace, "tiny-router"))
		}
		return errors.Join(left...)
	})
	mode(semmoev1.RoutingModeRouter)
	eventually(t, waitTimeout, "the Service selects the router, and the objects for a Gateway are deleted", func() error { return proxied(t.Context(), moed) })
	waitComplete(t, moed)
}
