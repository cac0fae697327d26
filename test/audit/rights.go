// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// Grant assigns the rules of a role to a user.
type Grant struct {
	// Role is the name of the role, for messages.
	Role  string
	Rules []rbacv1.PolicyRule
	// User is the name of the user, or a pattern of path.Match for several.
	User string
	// Namespace is the namespace in which the rules apply; empty means all namespaces.
	Namespace string
}

// ServiceAccount returns the user name of a service account.
func ServiceAccount(namespace, name string) string {
	return "system:serviceaccount:" + namespace + ":" + name
}

// Installed returns the grants of bindings to service accounts, and the sorted names of the roles without a binding. It
// returns an error for bindings to other subjects and to roles that are not passed, because their rights would not be
// checked.
func Installed(clusterRoles []rbacv1.ClusterRole, roles []rbacv1.Role, clusterBindings []rbacv1.ClusterRoleBinding, bindings []rbacv1.RoleBinding) (grants []Grant, unbound []string, err error) {
	everywhere, rules := map[string][]rbacv1.PolicyRule{}, map[string][]rbacv1.PolicyRule{}
	free := map[string]bool{}
	for _, role := range clusterRoles {
		everywhere[role.Name], free["ClusterRole "+role.Name] = role.Rules, true
	}
	for _, role := range roles {
		rules[role.Namespace+"/"+role.Name], free["Role "+role.Namespace+"/"+role.Name] = role.Rules, true
	}
	bind := func(binding, namespace string, ref rbacv1.RoleRef, subjects []rbacv1.Subject) error {
		role, found := "ClusterRole "+ref.Name, everywhere[ref.Name]
		if ref.Kind == "Role" {
			role, found = "Role "+namespace+"/"+ref.Name, rules[namespace+"/"+ref.Name]
		}
		if found == nil {
			return fmt.Errorf("%s binds %s, which does not exist or has no rules", binding, role)
		}
		delete(free, role)
		for _, subject := range subjects {
			if subject.Kind != rbacv1.ServiceAccountKind {
				return fmt.Errorf("%s binds a %s, which is not a ServiceAccount", binding, subject.Kind)
			}
			grants = append(grants, Grant{Role: role, Rules: found, User: ServiceAccount(subject.Namespace, subject.Name), Namespace: namespace})
		}
		return nil
	}
	for _, b := range clusterBindings {
		if err := bind("ClusterRoleBinding "+b.Name, "", b.RoleRef, b.Subjects); err != nil {
			return nil, nil, err
		}
	}
	for _, b := range bindings {
		if err := bind("RoleBinding "+b.Namespace+"/"+b.Name, b.Namespace, b.RoleRef, b.Subjects); err != nil {
			return nil, nil, err
		}
	}
	return grants, slices.Sorted(maps.Keys(free)), nil
}

// Without returns the rules without the rights to one resource.
func Without(rules []rbacv1.PolicyRule, resource string) []rbacv1.PolicyRule {
	var left []rbacv1.PolicyRule
	for _, rule := range rules {
		rule = *rule.DeepCopy()
		rule.Resources = slices.DeleteFunc(rule.Resources, func(r string) bool { return r == resource })
		if len(rule.Resources) > 0 {
			left = append(left, rule)
		}
	}
	return left
}

// right is a right to one verb on one resource.
type right struct {
	grant                       *Grant
	verb, group, resource, name string // name is empty if the right is to all objects
}

func (r right) String() string {
	text := fmt.Sprintf("%s: %s %s", r.grant.Role, r.verb, resourceName(r.resource, r.group))
	if r.name != "" {
		text += " " + r.name
	}
	return text
}

// rights returns the single rights of a grant. It returns an error for a wildcard, because a wildcard hides which of
// its rights are used.
func (g *Grant) rights() ([]right, error) {
	var all []right
	for _, rule := range g.Rules {
		if slices.Contains(slices.Concat(rule.Verbs, rule.APIGroups, rule.Resources), "*") {
			return nil, fmt.Errorf("%s has a wildcard rule: %+v", g.Role, rule)
		}
		names := rule.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					for _, name := range names {
						all = append(all, right{g, verb, group, resource, name})
					}
				}
			}
		}
	}
	return all, nil
}

// permits reports whether the right authorizes a request.
func (r right) permits(q Request) bool {
	return r.verb == q.Verb && r.group == q.Group && r.resource == q.Resource && (r.name == "" || r.name == q.Name) && r.grant.holds(q)
}

func (g *Grant) holds(q Request) bool {
	matches, err := path.Match(g.User, q.User)
	return err == nil && matches && (g.Namespace == "" || g.Namespace == q.Namespace)
}

// Unused returns the rights that no request used, in the order of the grants, and the total number of rights.
func (l *Log) Unused(grants []Grant) (unused []string, total int, err error) {
	for i := range grants {
		rights, err := grants[i].rights()
		if err != nil {
			return nil, 0, err
		}
		total += len(rights)
		for _, right := range rights {
			if !l.used(right) {
				unused = append(unused, right.String())
			}
		}
	}
	return unused, total, nil
}

// used reports whether a request used a right. The API server checks the right to update the finalizers of an owner
// while it creates an object that blocks the deletion of this owner.
func (l *Log) used(r right) bool {
	for q := range l.granted {
		if r.permits(q) {
			return true
		}
		if r.verb == "update" && strings.HasSuffix(r.resource, "/finalizers") && q.Verb == "create" && r.grant.holds(q) {
			return true
		}
	}
	return false
}

// lacksRight reports whether the message of a refusal is about a right that the API server checks while it answers an
// authorized request. Quotas, pod security and terminating namespaces refuse with the same code.
func lacksRight(message string) bool {
	return strings.Contains(message, "attempting to grant RBAC permissions not currently held") || strings.Contains(message, "cannot set blockOwnerDeletion")
}
