// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/test/audit"
)

// TestRightsThatNoRequestAsksFor checks rights that no audit log shows. The API server checks the right to block the
// deletion of an owner while it creates a child: without it, the manager cannot create a child. The manager has all
// rights of request routers, so that it can bind their role without the right to bind.
func TestRightsThatNoRequestAsksFor(t *testing.T) {
	var installed, router rbacv1.ClusterRole
	for file, role := range map[string]*rbacv1.ClusterRole{"role.yaml": &installed, "router.yaml": &router} {
		text, err := os.ReadFile(filepath.Join("..", "..", "config", "rbac", file))
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.UnmarshalStrict(text, role); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	if err := api.Create(t.Context(), &router); err != nil {
		t.Fatal(err)
	}
	t.Run("binding the role of request routers", func(t *testing.T) {
		t.Parallel()
		binding := &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "router"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: router.Name},
		}
		pods := rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}}
		with, without := userWith(t, "binds", installed.Rules), userWith(t, "binds-not", append(audit.Without(installed.Rules, "pods"), pods))
		eventually(t, "the manager can bind the role", func() error { return with.Create(t.Context(), binding.DeepCopy(), client.DryRunAll) })
		eventually(t, "a user with fewer rights cannot bind the role", func() error {
			return refused(without.Create(t.Context(), binding.DeepCopy(), client.DryRunAll), "attempting to grant RBAC permissions not currently held")
		})
	})
	for _, kind := range []string{"MoEDeployment", "AffinityProfile", "PlacementPlan"} {
		t.Run("blocking the deletion of the owner: "+kind, func(t *testing.T) {
			t.Parallel()
			resource := strings.ToLower(kind) + "s/finalizers"
			less := audit.Without(installed.Rules, resource)
			if len(resources(less)) != len(resources(installed.Rules))-1 {
				t.Fatalf("the manager's role has no rule about %s", resource)
			}
			with, without := userWith(t, "keeps-"+kind, installed.Rules), userWith(t, "keeps-no-"+kind, less)
			makes := func(user client.Client) error { return user.Create(t.Context(), childOf(kind), client.DryRunAll) }
			eventually(t, "the manager can create a child", func() error { return makes(with) })
			eventually(t, "a user without the right to "+resource+" cannot create a child", func() error { return refused(makes(without), "cannot set blockOwnerDeletion") })
		})
	}
}

// refused returns an error unless err contains the text.
func refused(err error, text string) error {
	if err == nil || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("error %v, want one with %q", err, text)
	}
	return nil
}

// eventually retries f for up to a minute, because the API server observes new rights, and every 30 s new kinds of
// owners, with a delay.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	var last error
	if err := wait.PollUntilContextTimeout(t.Context(), 200*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		last = f()
		return last == nil, nil
	}); err != nil {
		t.Fatalf("%s: %v: %v", what, err, last)
	}
}

// childOf returns an object that blocks the deletion of its owner.
func childOf(kind string) client.Object {
	owner := &metav1.ObjectMeta{Name: "owner", UID: "00000000-0000-0000-0000-000000000000"}
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "child", OwnerReferences: ownership.ControllerReference(owner, kind)},
		Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "i"}},
		}}},
	}
}

// userWith creates a user with the rules, and returns a client that acts as the user.
func userWith(t *testing.T, name string, rules []rbacv1.PolicyRule) client.Client {
	t.Helper()
	meta := metav1.ObjectMeta{Name: name}
	for _, object := range []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: meta,
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
		},
	} {
		if err := api.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	user := rest.CopyConfig(config)
	user.Impersonate = rest.ImpersonationConfig{UserName: name}
	c, err := client.New(user, client.Options{Scheme: api.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// resources returns the resources of rules, with their API groups.
func resources(rules []rbacv1.PolicyRule) []string {
	var all []string
	for _, rule := range rules {
		for _, resource := range rule.Resources {
			all = append(all, fmt.Sprint(rule.APIGroups, resource))
		}
	}
	return all
}
