// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

// rights represents a user with the manager's rights, which tests can revoke.
type rights struct {
	user string
	role *rbacv1.ClusterRole
}

// grantRights creates a user with the rights that config/rbac grants the manager, until the test ends.
func grantRights(t *testing.T, user string) *rights {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(repository, "config", "rbac", "role.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	role := &rbacv1.ClusterRole{}
	if err := yaml.UnmarshalStrict(data, role); err != nil {
		t.Fatal(err)
	}
	role.Name = user
	create(t, role)
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}
	create(t, binding)
	r := &rights{user, role}
	r.waitMay(t, true)
	return r
}

// config returns the configuration for clients of the user.
func (r *rights) config() *rest.Config {
	config := rest.CopyConfig(restConfig)
	config.Impersonate = rest.ImpersonationConfig{UserName: r.user}
	return config
}

// revoke leaves the user only the rights in left, and returns a function that restores all rights. Both wait until the
// change is effective.
func (r *rights) revoke(t *testing.T, left []rbacv1.PolicyRule) (restore func()) {
	t.Helper()
	set := func(rules []rbacv1.PolicyRule, may bool) {
		t.Helper()
		changed := r.role.DeepCopy()
		changed.Rules = rules
		if err := api.Update(t.Context(), changed); err != nil {
			t.Fatal(err)
		}
		r.role.ResourceVersion = changed.ResourceVersion
		r.waitMay(t, may)
	}
	set(left, false)
	return func() {
		t.Helper()
		set(r.role.Rules, true)
	}
}

// waitMay waits until the API server allows the user to create workloads, or denies it.
func (r *rights) waitMay(t *testing.T, may bool) {
	t.Helper()
	eventually(t, waitTimeout, fmt.Sprintf("%s may create workloads: %v", r.user, may), func() error {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: r.user, ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: "create", Group: "apps", Resource: "statefulsets"},
		}}
		if err := api.Create(t.Context(), review); err != nil {
			return err
		}
		if review.Status.Allowed != may {
			return fmt.Errorf("allowed is %v", review.Status.Allowed)
		}
		return nil
	})
}

// mayRead grants the user read access to one Secret.
func (r *rights) mayRead(t *testing.T, namespace, secret string) {
	t.Helper()
	meta := metav1.ObjectMeta{Namespace: namespace, Name: "read-" + secret}
	create(t, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{secret}, Verbs: []string{"get"},
	}}})
	create(t, &rbacv1.RoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: r.user}},
	})
}

// readOnly returns the rules without write access to one resource.
func readOnly(rules []rbacv1.PolicyRule, resource string) []rbacv1.PolicyRule {
	var left []rbacv1.PolicyRule
	for _, rule := range rules {
		rule = *rule.DeepCopy()
		if slices.Contains(rule.Resources, resource) {
			rule.Verbs = []string{"get", "list", "watch"}
		}
		left = append(left, rule)
	}
	return left
}

// TestRightsRevoked revokes rights of a running manager. The manager reports the loss when it needs the right, while it
// can write status. The serving pods keep serving, and changes are applied once the rights are restored.
func TestRightsRevoked(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	granted := grantRights(t, namespace)
	injector := faults.New(faults.Schedule{})
	startManagerAs(t, granted.config(), image, namespace, injector)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	since, err := readySince(waitComplete(t, moed))
	if err != nil {
		t.Fatal(err)
	}
	state := endState(t, namespace)
	asking := startTraffic(t, serviceURL(t, moed))
	setEnv := func(env []corev1.EnvVar) {
		update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Env = env })
	}
	recovered := func(restore func()) time.Duration {
		t.Helper()
		restore()
		begin := time.Now()
		if again, err := readySince(waitComplete(t, moed)); err != nil || again != since {
			t.Errorf("the deployment is ready since %v, was since %v, %v", again, since, err)
		}
		return time.Since(begin)
	}

	restore := granted.revoke(t, readOnly(granted.role.Rules, "statefulsets"))
	setEnv([]corev1.EnvVar{{Name: "CHANGED", Value: "yes"}})
	asked := time.Now()
	waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ReconcileFailed", "forbidden", "statefulsets")
	reported := time.Since(asked)
	workloads := recovered(restore)

	// Without any right the manager cannot report anything either.
	restore = granted.revoke(t, nil)
	writes := injector.Writes()
	setEnv(nil)
	eventually(t, waitTimeout, "the manager's writes are refused", func() error {
		if injector.Writes() == writes {
			return fmt.Errorf("the number of writes is still %d", writes)
		}
		return nil
	})
	all := recovered(restore)
	served := asking.end(t)
	eventually(t, settleTimeout, "the previous state is restored", func() error { return same("state", state, endState(t, namespace)) })
	t.Logf("the missing right is reported after %.1f s; the change is in service %.1f s after the right is restored, and %.1f s after all rights are restored; %d requests answered in this time, none failed; %v",
		reported.Seconds(), workloads.Seconds(), all.Seconds(), served, injector)
	clearNamespace(t, namespace)
}
