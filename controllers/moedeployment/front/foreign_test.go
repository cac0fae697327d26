// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/result"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/tier"
)

// apiServer returns a client of a real API server with the operator's kinds.
func apiServer(t *testing.T) client.WithWatch {
	t.Helper()
	server, err := apiserver.Start(&envtest.Environment{
		CRDDirectoryPaths: []string{filepath.Join("..", "..", "..", "config", "crd")}, ErrorIfCRDPathMissing: true,
	})
	tier.Require(t, err)
	t.Cleanup(func() { server.Stop() }) //nolint:errcheck // the processes end with this one
	server.Config.QPS, server.Config.Burst = 1000, 1000
	c, err := client.NewWithWatch(server.Config, client.Options{Scheme: moedtest.GroupScheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// oursAlone returns a client that reads like the operator's cache: it contains only objects with a component label.
func oursAlone(c client.WithWatch) client.WithWatch {
	return interceptor.NewClient(c, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
			err := c.Get(ctx, key, into, options...)
			if err == nil && into.GetLabels()[semmoev1.LabelComponent] == "" {
				return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
			}
			return err
		},
	})
}

// children returns the children of a MoEDeployment m with routers, by kind and name.
func children() map[string]client.Object {
	return map[string]client.Object{
		"Service m": &corev1.Service{}, "Service m-pods": &corev1.Service{}, "ServiceAccount m-router": &corev1.ServiceAccount{},
		"RoleBinding m-router": &rbacv1.RoleBinding{}, "Deployment m-router": &appsv1.Deployment{},
		"PodDisruptionBudget m": &policyv1.PodDisruptionBudget{}, "PodDisruptionBudget m-router": &policyv1.PodDisruptionBudget{},
		"NetworkPolicy m": &networkingv1.NetworkPolicy{}, "NetworkPolicy m-router": &networkingv1.NetworkPolicy{},
	}
}

// Objects of other owners stay unchanged, and are reported. Independent objects are created, and the others
// after the conflict is resolved. Restored objects belong to the operator.
func TestForeignObjects(t *testing.T) {
	api := apiServer(t)
	labels := map[string]string{"app": "theirs"}
	selector := &metav1.LabelSelector{MatchLabels: labels}
	ports := []corev1.ServicePort{{Port: 80}}
	pod := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "theirs:1"}}}}
	for name, tc := range map[string]struct {
		object client.Object
		// missing are the objects that are not created until then.
		missing []string
	}{
		// The foreign Service does not select the engines, so the policy still admits only the routers.
		"Service m":                    {&corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Selector: labels, Ports: ports}}, nil},
		"Service m-pods":               {&corev1.Service{Spec: corev1.ServiceSpec{Ports: ports}}, nil},
		"ServiceAccount m-router":      {&corev1.ServiceAccount{}, []string{"RoleBinding m-router", "Deployment m-router", "PodDisruptionBudget m-router"}},
		"RoleBinding m-router":         {&rbacv1.RoleBinding{RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "r"}}, []string{"Deployment m-router", "PodDisruptionBudget m-router"}},
		"Deployment m-router":          {&appsv1.Deployment{Spec: appsv1.DeploymentSpec{Selector: selector, Template: pod}}, []string{"PodDisruptionBudget m-router"}},
		"PodDisruptionBudget m":        {&policyv1.PodDisruptionBudget{Spec: policyv1.PodDisruptionBudgetSpec{Selector: selector}}, nil},
		"PodDisruptionBudget m-router": {&policyv1.PodDisruptionBudget{Spec: policyv1.PodDisruptionBudgetSpec{Selector: selector}}, nil},
		"NetworkPolicy m":              {&networkingv1.NetworkPolicy{Spec: networkingv1.NetworkPolicySpec{PodSelector: *selector}}, nil},
		"NetworkPolicy m-router":       {&networkingv1.NetworkPolicy{Spec: networkingv1.NetworkPolicySpec{PodSelector: *selector}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			namespace := strings.ReplaceAll(strings.ToLower(name), " ", "-")
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Namespace, m.UID, m.Generation = namespace, "", 0 })
			tc.object.SetNamespace(namespace)
			tc.object.SetName(strings.Fields(name)[1])
			for _, object := range []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, moed, tc.object} {
				if err := api.Create(t.Context(), object); err != nil {
					t.Fatal(err)
				}
			}
			f := &Front{Client: oursAlone(api), Live: api, Store: &access.Access{}, Image: "semmoe:1", Namespace: "semmoe-system"}
			made := func(kind string, child client.Object) bool {
				err := api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: strings.Fields(kind)[1]}, child)
				return err == nil && metav1.IsControlledBy(child, moed)
			}
			var foreign *result.ForeignError
			state, err := f.Reconcile(t.Context(), moed, Engines{})
			if !errors.As(err, &foreign) || !strings.Contains(foreign.Message, name+" exists and belongs to another owner") {
				t.Errorf("unexpected error: %v", err)
			}
			if taken := state.ServiceTaken; (taken != "") != (name == "Service m") || taken != "" && taken != foreign.Message {
				t.Errorf("ServiceTaken is %q", taken)
			}
			found := children()[name]
			if made(name, found) || found.GetResourceVersion() != tc.object.GetResourceVersion() {
				t.Errorf("it was written: %v", found)
			}
			for kind, child := range children() {
				if got, want := made(kind, child), kind != name && !slices.Contains(tc.missing, kind); got != want {
					t.Errorf("%s is made: %v, want %v", kind, got, want)
				}
			}
			if err := api.Delete(t.Context(), tc.object); err != nil {
				t.Fatal(err)
			}
			if state, err := f.Reconcile(t.Context(), moed, Engines{}); err != nil || state != (State{}) {
				t.Errorf("once it has gone: %+v, %v", state, err)
			}
			for kind, child := range children() {
				if !made(kind, child) {
					t.Errorf("%s is not made once %s has gone", kind, name)
				}
			}
			restored := children()[name]
			made(name, restored)
			restored.SetOwnerReferences(nil)
			restored.SetLabels(ownership.OperatorLabels())
			if err := api.Update(t.Context(), restored); err != nil {
				t.Fatal(err)
			}
			if _, err := f.Reconcile(t.Context(), moed, Engines{}); err != nil || !made(name, restored) {
				t.Errorf("a restored object is not adopted: %v", err)
			}
		})
	}
}

// While a Service cannot be read, its last state stays: a read error does not turn a foreign Service into an own one.
func TestUnreadableService(t *testing.T) {
	down := errors.New("the API server is down")
	c := interceptor.NewClient(moedtest.Cluster(t), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
			if _, service := into.(*corev1.Service); service {
				return down
			}
			return c.Get(ctx, key, into, options...)
		},
	})
	for endpoint, taken := range map[string]bool{"http://m.ns.svc:8000": false, "": true} {
		moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.Mode, m.Status.Endpoint = semmoev1.RoutingModeNone, endpoint
		})
		f := &Front{Client: c, Live: c, Store: &access.Access{}, Image: "semmoe:1", Namespace: "semmoe-system"}
		state, err := f.Reconcile(t.Context(), moed, Engines{})
		if !errors.Is(err, down) || (state.ServiceTaken != "") != taken {
			t.Errorf("with endpoint %q, ServiceTaken is %q (%v)", endpoint, state.ServiceTaken, err)
		}
	}
}

// The Service of another MoEDeployment may select engines, but only the own Service keeps selecting engines until a
// router serves.
func TestTargetOfForeignService(t *testing.T) {
	moed := moedtest.Deployment()
	for name, want := range map[string]string{"m": semmoev1.ComponentEngine, "another": semmoev1.ComponentRouter} {
		owner := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Name, m.UID = name, types.UID("uid of "+name) })
		found := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", Labels: ownership.OperatorLabels(), OwnerReferences: ownership.ControllerReference(owner, "MoEDeployment")},
			Spec:       corev1.ServiceSpec{Selector: map[string]string{semmoev1.LabelComponent: semmoev1.ComponentEngine}},
		}
		c := moedtest.Cluster(t, found)
		if target, err := (&Front{Client: c, Live: c}).serviceTarget(t.Context(), moed, false); err != nil || target != want {
			t.Errorf("with a Service of %s, the target is %q (%v), want %q", name, target, err, want)
		}
	}
}

// An InferencePool of another owner stays unchanged.
func TestForeignPool(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker })
	pool := &unstructured.Unstructured{}
	pool.SetGroupVersionKind(InferencePool)
	pool.SetNamespace("ns")
	pool.SetName("m")
	c := moedtest.Cluster(t, moed, pool)
	_, err := (&Front{Client: c, Live: c}).reconcilePicker(t.Context(), moed, Engines{})
	var foreign *result.ForeignError
	if !errors.As(err, &foreign) || foreign.Message != "InferencePool m exists and belongs to another owner: delete it" {
		t.Errorf("unexpected error: %v", err)
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(pool), pool); err != nil || pool.Object["spec"] != nil {
		t.Errorf("it was written: %v, %v", err, pool)
	}
}
