// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// line returns an event in the format of an API server.
func line(user, verb, object, code, decision string) string {
	return `{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","stage":"ResponseComplete","verb":"` + verb +
		`","user":{"username":"system:serviceaccount:` + user + `"},"objectRef":` + object +
		`,"responseStatus":{"metadata":{},` + code + `},"annotations":{"authorization.k8s.io/decision":"` + decision + `"}}` + "\n"
}

const (
	podInA  = `{"resource":"pods","namespace":"a","name":"p","apiVersion":"v1"}`
	podInB  = `{"resource":"pods","namespace":"b","name":"p","apiVersion":"v1"}`
	podEnds = `{"resource":"pods","namespace":"a","name":"p","apiVersion":"v1","subresource":"status"}`
	job     = `{"resource":"jobs","namespace":"a","name":"j","apiGroup":"batch","apiVersion":"v1"}`
	binding = `{"resource":"rolebindings","namespace":"a","name":"r","apiGroup":"rbac.authorization.k8s.io","apiVersion":"v1"}`
	ours    = `{"resource":"secrets","namespace":"a","name":"ours","apiVersion":"v1"}`
	theirs  = `{"resource":"secrets","namespace":"a","name":"theirs","apiVersion":"v1"}`
	ok      = `"code":200`
	made    = `"code":201`
)

func rule(verbs, group, resources string, names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: strings.Fields(verbs), APIGroups: []string{group}, Resources: strings.Fields(resources), ResourceNames: names}
}

func TestUnused(t *testing.T) {
	cases := map[string]struct {
		log  string
		rule rbacv1.PolicyRule
		in   string // the namespace of the grant
		want []string
	}{
		"each verb of each resource counts": {
			log: line("s:m", "get", podInA, ok, "allow"), rule: rule("get list", "", "pods services"),
			want: []string{"r: list pods", "r: get services", "r: list services"},
		},
		"any response":                     {log: line("s:m", "get", podInA, `"code":404`, "allow"), rule: rule("get", "", "pods")},
		"a refused request does not count": {log: line("s:m", "get", podInA, `"code":403`, "forbid"), rule: rule("get", "", "pods"), want: []string{"r: get pods"}},
		"request of another user":          {log: line("s:other", "get", podInA, ok, "allow"), rule: rule("get", "", "pods"), want: []string{"r: get pods"}},
		"request in another namespace":     {log: line("s:m", "get", podInB, ok, "allow"), rule: rule("get", "", "pods"), in: "a", want: []string{"r: get pods"}},
		"request in the namespace":         {log: line("s:m", "get", podInA, ok, "allow"), rule: rule("get", "", "pods"), in: "a"},
		"another API group":                {log: line("s:m", "get", job, ok, "allow"), rule: rule("get", "", "jobs"), want: []string{"r: get jobs"}},
		"subresource without a rule":       {log: line("s:m", "get", podEnds, ok, "allow"), rule: rule("get", "", "pods"), want: []string{"r: get pods"}},
		"subresource":                      {log: line("s:m", "patch", podEnds, ok, "allow"), rule: rule("patch", "", "pods/status")},
		"resource name":                    {log: line("s:m", "get", ours, ok, "allow"), rule: rule("get", "", "secrets", "ours")},
		"another resource name":            {log: line("s:m", "get", theirs, ok, "allow"), rule: rule("get", "", "secrets", "ours"), want: []string{"r: get secrets ours"}},
		"apply of an existing object":      {log: line("s:m", "patch", job, ok, "allow"), rule: rule("create patch", "batch", "jobs"), want: []string{"r: create jobs.batch"}},
		"apply of a missing object":        {log: line("s:m", "patch", job, made, "allow"), rule: rule("create patch", "batch", "jobs")},
		"finalizers, without creation":     {log: line("s:m", "get", podInA, ok, "allow"), rule: rule("update", "g", "ks/finalizers"), want: []string{"r: update ks/finalizers.g"}},
		"finalizers, with one":             {log: line("s:m", "create", job, made, "allow"), rule: rule("update", "g", "ks/finalizers")},
		"request without an object":        {log: line("s:m", "get", "null", ok, "allow"), rule: rule("get", "", "pods"), want: []string{"r: get pods"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			l := NewLog()
			if err := l.Read(strings.NewReader(tc.log)); err != nil {
				t.Fatal(err)
			}
			got, _, err := l.Unused([]Grant{{Role: "r", Rules: []rbacv1.PolicyRule{tc.rule}, User: ServiceAccount("s", "m"), Namespace: tc.in}})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("unused rights (-want +got):\n%s", diff)
			}
		})
	}
	if _, _, err := NewLog().Unused([]Grant{{Role: "r", Rules: []rbacv1.PolicyRule{rule("*", "", "pods")}}}); err == nil {
		t.Error("Unused accepts a wildcard rule, want an error")
	}
}

// TestRefused checks that Refused returns only requests without a right. Refusals because of a quota or of a
// terminating namespace are not about rights.
func TestRefused(t *testing.T) {
	l := NewLog()
	if err := l.Read(strings.NewReader(
		line("s:m", "get", podInA, `"code":403,"message":"no RBAC policy matched"`, "forbid") +
			line("s:m", "get", ours, `"code":403,"message":"its binding was deleted"`, "forbid") +
			line("s:m", "create", podInB, `"code":403,"message":"exceeded quota: none"`, "allow") +
			line("s:m", "patch", binding, `"code":403,"message":"user is attempting to grant RBAC permissions not currently held"`, "allow") +
			line("s:m", "create", job, `"code":403,"message":"cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on"`, "allow"))); err != nil {
		t.Fatal(err)
	}
	grants := []Grant{{Role: "r", Rules: []rbacv1.PolicyRule{rule("create", "batch", "jobs"), rule("get", "", "secrets")}, User: ServiceAccount("s", "m")}}
	got, err := l.Refused(grants)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"system:serviceaccount:s:m: create jobs.batch a/j: cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on",
		"system:serviceaccount:s:m: get pods a/p: no RBAC policy matched",
		"system:serviceaccount:s:m: patch rolebindings.rbac.authorization.k8s.io a/r: user is attempting to grant RBAC permissions not currently held",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("refused requests (-want +got):\n%s", diff)
	}
}

func TestInsecureContainers(t *testing.T) {
	l := NewLog()
	const why = `would violate PodSecurity \"restricted:latest\": allowPrivilegeEscalation != false (containers \"a\", \"b\" must set securityContext.allowPrivilegeEscalation=false), ` +
		`restricted volume types (volume \"v\" uses restricted volume type \"hostPath\"), runAsNonRoot != true (pod or container \"c\" must set securityContext.runAsNonRoot=true), ` +
		`seccompProfile (pod or containers \"d\", \"users\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")`
	insecure := strings.Replace(line("s:m", "create", job, made, "allow"), `"annotations":{`, `"annotations":{"pod-security.kubernetes.io/audit-violations":"`+why+`",`, 1)
	if err := l.Read(strings.NewReader(insecure + line("s:m", "create", podInA, made, "allow"))); err != nil {
		t.Fatal(err)
	}
	got := l.InsecureContainers("users")
	if len(got) != 4 || got["users"] == "" || !strings.HasPrefix(got["a"], "system:serviceaccount:s:m: create jobs.batch a/j: would violate") || got["b"] == "" || got["c"] == "" {
		t.Errorf("insecure containers = %v, want a, b, c and users", got)
	}
}

func TestBrokenLog(t *testing.T) {
	if err := NewLog().Read(strings.NewReader("{}\n{\n")); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("truncated object in line 2: error %v, want one that names line 2", err)
	}
	if err := NewLog().Read(strings.NewReader("{}\n{")); err != nil {
		t.Errorf("incomplete last line: %v", err)
	}
}

func TestInstalled(t *testing.T) {
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	account := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "s", Name: "m"}}
	pods := []rbacv1.PolicyRule{rule("get", "", "pods")}
	clusterRoles := []rbacv1.ClusterRole{{ObjectMeta: meta("", "c"), Rules: pods}, {ObjectMeta: meta("", "free"), Rules: pods}}
	roles := []rbacv1.Role{{ObjectMeta: meta("a", "r"), Rules: pods}}
	grants, unbound, err := Installed(clusterRoles, roles,
		[]rbacv1.ClusterRoleBinding{{RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "c"}, Subjects: account}},
		[]rbacv1.RoleBinding{
			{ObjectMeta: meta("a", "1"), RoleRef: rbacv1.RoleRef{Kind: "Role", Name: "r"}, Subjects: account},
			{ObjectMeta: meta("b", "2"), RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "c"}, Subjects: account},
		})
	if err != nil {
		t.Fatal(err)
	}
	want := []Grant{
		{Role: "ClusterRole c", Rules: pods, User: "system:serviceaccount:s:m"},
		{Role: "Role a/r", Rules: pods, User: "system:serviceaccount:s:m", Namespace: "a"},
		{Role: "ClusterRole c", Rules: pods, User: "system:serviceaccount:s:m", Namespace: "b"},
	}
	if diff := cmp.Diff(want, grants); diff != "" {
		t.Errorf("grants (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"ClusterRole free"}, unbound); diff != "" {
		t.Errorf("unbound roles (-want +got):\n%s", diff)
	}
	for name, b := range map[string]rbacv1.RoleBinding{
		"a missing role": {ObjectMeta: meta("b", "x"), RoleRef: rbacv1.RoleRef{Kind: "Role", Name: "r"}, Subjects: account},
		"a group":        {ObjectMeta: meta("a", "x"), RoleRef: rbacv1.RoleRef{Kind: "Role", Name: "r"}, Subjects: []rbacv1.Subject{{Kind: rbacv1.GroupKind, Name: "g"}}},
	} {
		if _, _, err := Installed(clusterRoles, roles, nil, []rbacv1.RoleBinding{b}); err == nil {
			t.Errorf("Installed accepts a binding of %s, want an error", name)
		}
	}
}
