// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl"
)

// plugin runs kubectl semmoe against the API server, as any user.
type plugin struct {
	t          *testing.T
	kubeconfig string
	namespace  string
}

func newPlugin(t *testing.T, namespace string) plugin {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	const name = "test"
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name, Namespace: namespace}},
		CurrentContext: name,
	}, file)
	if err != nil {
		t.Fatal(err)
	}
	return plugin{t, file, namespace}
}

// run runs a command as a user, and returns its output and its exit code.
func (p plugin) run(user, command string) (string, int) {
	p.t.Helper()
	var out bytes.Buffer
	args := append([]string{"kubectl-semmoe", "--kubeconfig=" + p.kubeconfig, "--as=" + user}, strings.Fields(command)...)
	code := kubectl.Main(p.t.Context(), args, &out, &out, func(string) string { return "" })
	return out.String(), code
}

// expect runs a command as a user, checks its exit code, and then reads the object.
func (p plugin) expect(user, command string, code int, object client.Object) {
	p.t.Helper()
	if output, got := p.run(user, command); got != code {
		p.t.Fatalf("kubectl semmoe %s: exit code %d, want %d:\n%s", command, got, code, output)
	}
	if err := api.Get(p.t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
		p.t.Fatal(err)
	}
}

// TestPluginWrites checks that the plugin writes the same field that the documentation describes for manual changes,
// with its own field manager. It needs only the default roles of the cluster and the rights that the operator adds to
// them.
func TestPluginWrites(t *testing.T) {
	const namespace = "plugin"
	editor, viewer := pluginUsers(t, namespace)
	moed := &semmoev1.MoEDeployment{}
	text := strings.NewReplacer("NAME", "qwen", "namespace: default", "namespace: "+namespace).Replace(minimal)
	if err := yaml.Unmarshal([]byte(text), moed); err != nil {
		t.Fatal(err)
	}
	plan := &semmoev1.PlacementPlan{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "good", Labels: map[string]string{semmoev1.LabelDeployment: "qwen"}},
		Spec:       semmoev1.PlacementPlanSpec{ProfileRef: semmoev1.ProfileReference{Name: "chat"}, ExpertParallelSize: 4},
	}
	for _, object := range []client.Object{moed, plan} {
		if err := api.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	digest := strings.Repeat("ab", 32)
	plan.Status = semmoev1.PlacementPlanStatus{
		Plan: digest[:16], PlanDigest: digest, Verdict: semmoev1.VerdictGain,
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Published", LastTransitionTime: metav1.Now()}},
	}
	if err := api.Status().Update(t.Context(), plan); err != nil {
		t.Fatal(err)
	}
	spec := moed.Spec.DeepCopy()
	p := newPlugin(t, namespace)

	// The first command waits until the API server has observed the rights.
	eventually(t, "the editor can pause", func() error {
		if output, code := p.run(editor, "pause qwen --dry-run=server"); code != 0 {
			return fmt.Errorf("exit code %d: %s", code, output)
		}
		return nil
	})
	p.expect(editor, "pause qwen --dry-run=server", 0, moed)
	if moed.Spec.Reconciliation != semmoev1.ReconciliationActive {
		t.Error("a dry run paused the deployment")
	}
	p.expect(editor, "pause qwen", 0, moed)
	if moed.Spec.Reconciliation != semmoev1.ReconciliationPaused {
		t.Errorf("reconciliation is %s, want Paused", moed.Spec.Reconciliation)
	}
	p.expect(editor, "resume qwen", 0, moed)
	p.expect(editor, "approve qwen good", 0, moed)
	if got := moed.Annotations[semmoev1.AnnotationApprove]; got != digest[:16] {
		t.Errorf("approval is %q, want the plan digest", got)
	}
	p.expect(editor, "rollback qwen --to abababab", 0, moed)
	if ref := moed.Spec.Placement.PlanRef; ref == nil || ref.Name != plan.Name {
		t.Errorf("the plan is not pinned: %v", ref)
	}
	written := func(entry metav1.ManagedFieldsEntry) bool { return entry.Manager == "kubectl-semmoe" }
	if !slices.ContainsFunc(moed.ManagedFields, written) {
		t.Errorf("field manager kubectl-semmoe owns no field: %+v", moed.ManagedFields)
	}
	p.expect(editor, "rollback qwen --unpin", 0, moed)
	if moed.Spec.Placement.PlanRef != nil || moed.Spec.Reconciliation != spec.Reconciliation || moed.Spec.Engine.Image != spec.Engine.Image {
		t.Errorf("the spec differs from the first one: %+v", moed.Spec)
	}

	moed.Status = semmoev1.MoEDeploymentStatus{
		PlanDigest: digest[:16], Plan: plan.Name, Rollout: &semmoev1.RolloutStatus{Phase: semmoev1.RolloutPhaseCanary, Since: metav1.Now(), CandidateRevision: "b293798526", CandidatePlan: digest[:16]},
	}
	if err := api.Status().Update(t.Context(), moed); err != nil {
		t.Fatal(err)
	}
	p.expect(editor, "rollback qwen", 0, plan)
	if plan.Annotations[semmoev1.AnnotationFailed+"b293798526"] == "" {
		t.Errorf("the plan is not marked as failed: %v", plan.Annotations)
	}
	p.expect(viewer, "pause qwen", 1, moed)
	p.expect(viewer, "status qwen", 0, moed)
	if output, _ := p.run(viewer, "status qwen"); strings.Contains(output, "Not shown") {
		t.Errorf("the viewer does not see all objects:\n%s", output)
	}
	p.expect("unprivileged", "status qwen", 1, moed)
	p.expect(viewer, "explain good", 0, moed)
	replans(t, p, editor, moed)
}

// replans checks that replan creates a valid profile and a valid plan, which the deployment owns.
func replans(t *testing.T, p plugin, editor string, moed *semmoev1.MoEDeployment) {
	t.Helper()
	moed.Spec.Profiling = &semmoev1.ProfilingSpec{Dataset: &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "texts"}}}
	if err := api.Update(t.Context(), moed); err != nil {
		t.Fatal(err)
	}
	p.expect(editor, "replan qwen", 4, moed) // the profile of the plan in service does not exist
	profile := &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "chat"},
		Spec:       semmoev1.AffinityProfileSpec{Model: moed.Spec.Model, Engine: moed.Spec.Engine, Parallelism: moed.Spec.Parallelism, Dataset: moed.Spec.Profiling.Dataset, DeploymentRef: &semmoev1.DeploymentReference{Name: moed.Name}},
	}
	if err := api.Create(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	profile.Status.Result = &semmoev1.ProfileResult{Digest: strings.Repeat("cd", 32), Requests: 1, Tokens: 2, TracedTokens: 2}
	if err := api.Status().Update(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	p.expect(editor, "replan qwen", 0, moed)
	var plans semmoev1.PlacementPlanList
	var profiles semmoev1.AffinityProfileList
	for _, list := range []client.ObjectList{&plans, &profiles} {
		if err := api.List(t.Context(), list, client.InNamespace(p.namespace)); err != nil {
			t.Fatal(err)
		}
	}
	if len(plans.Items) != 2 || len(profiles.Items) != 2 {
		t.Fatalf("found %d plans and %d profiles", len(plans.Items), len(profiles.Items))
	}
	owned := func(profile semmoev1.AffinityProfile) bool {
		return len(profile.OwnerReferences) == 1 && profile.OwnerReferences[0].UID == moed.UID
	}
	if !slices.ContainsFunc(profiles.Items, owned) {
		t.Errorf("the deployment owns no profile: %+v", profiles.Items)
	}
}

// pluginUsers creates a namespace, and users with the cluster roles edit and view in this namespace. It also binds the
// operator's roles that extend edit and view, because no controller aggregates them in this test.
func pluginUsers(t *testing.T, namespace string) (editor, viewer string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "config", "rbac", "users.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	objects := []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}}
	bind := func(user string, roles ...string) {
		for _, role := range roles {
			objects = append(objects, &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: user + "-" + strings.ReplaceAll(role, ":", "-")},
				RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
				Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
			})
		}
	}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		role := &rbacv1.ClusterRole{}
		if err := yaml.UnmarshalStrict([]byte(document), role); err != nil {
			t.Fatal(err)
		}
		objects = append(objects, role)
	}
	bind("editor", "system:aggregate-to-view", "system:aggregate-to-edit", "semmoe-viewer", "semmoe-editor")
	bind("viewer", "system:aggregate-to-view", "semmoe-viewer")
	for _, object := range objects {
		if err := api.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	return "editor", "viewer"
}
