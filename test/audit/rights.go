package audit

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// Grant gives the rules of a role to a user.
type Grant struct {
	// Role is the role's name, for messages.
	Role  string
	Rules []rbacv1.PolicyRule
	// User is the name of the user, or a pattern of path.Match for several.
	User string
	// Namespace is where the rules hold; empty means everywhere.
	Namespace string
}

// ServiceAccount is the user that a service account is to the API server.
func ServiceAccount(namespace, name string) string {
	return "system:serviceaccount:" + namespace + ":" + name
}

// Installed are the grants of bindings to service accounts, and the names of the roles that nobody is bound to, in order. Bindings of
// others, and of roles that are not given, are errors: their rights would not be looked at.
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
			return fmt.Errorf("%s binds %s, which is not there, or grants nothing", binding, role)
		}
		delete(free, role)
		for _, subject := range subjects {
			if subject.Kind != rbacv1.ServiceAccountKind {
				return fmt.Errorf("%s binds a %s, which is no ServiceAccount", binding, subject.Kind)
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

// Without are the rules without any right to one resource.
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

// right is one verb on one resource that a grant gives.
type right struct {
	grant                       *Grant
	verb, group, resource, name string // name is empty where the right is to all
}

func (r right) String() string {
	text := fmt.Sprintf("%s: %s %s", r.grant.Role, r.verb, resourceName(r.resource, r.group))
	if r.name != "" {
		text += " " + r.name
	}
	return text
}

// rights are the single rights of a grant. A wildcard is an error: nobody could tell which of its rights are used.
func (g *Grant) rights() ([]right, error) {
	var all []right
	for _, rule := range g.Rules {
		if slices.Contains(slices.Concat(rule.Verbs, rule.APIGroups, rule.Resources), "*") {
			return nil, fmt.Errorf("%s grants all of something: %+v", g.Role, rule)
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

// permits tells that a request needs this right.
func (r right) permits(q Request) bool {
	return r.verb == q.Verb && r.group == q.Group && r.resource == q.Resource && (r.name == "" || r.name == q.Name) && r.grant.holds(q)
}

func (g *Grant) holds(q Request) bool {
	matches, err := path.Match(g.User, q.User)
	return err == nil && matches && (g.Namespace == "" || g.Namespace == q.Namespace)
}

// Unused are the rights that no request has used, in the order of the grants, and how many rights there are.
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

// used tells that a request has used a right. That to update the finalizers of an owner is looked up while an object is created that
// blocks the deletion of the owner.
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

// lacksRight tells that a refusal is about a right that is looked up while a request is answered that was permitted itself: a quota,
// pod security and a namespace that is going refuse with the same code.
func lacksRight(message string) bool {
	return strings.Contains(message, "attempting to grant RBAC permissions not currently held") || strings.Contains(message, "cannot set blockOwnerDeletion")
}
