// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	networkingac "k8s.io/client-go/applyconfigurations/networking/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/kube/ownership"
)

// A stale cache that shows the Service before a router took over does not switch the Service back to the engines.
func TestServiceIsNotSwitchedBack(t *testing.T) {
	leading := func(component string) *corev1.Service {
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", Labels: ownership.OperatorLabels()},
			Spec:       corev1.ServiceSpec{Selector: map[string]string{semmoev1.LabelComponent: component}},
		}
	}
	engines, router := leading(semmoev1.ComponentEngine), leading(semmoev1.ComponentRouter)
	for name, tc := range map[string]struct {
		cached, live []client.Object
		serves       bool
		want         string
	}{
		"no Service":                {nil, nil, false, semmoev1.ComponentRouter},
		"selects the engines":       {[]client.Object{engines}, []client.Object{engines}, false, semmoev1.ComponentEngine},
		"the router takes over":     {[]client.Object{engines}, []client.Object{engines}, true, semmoev1.ComponentRouter},
		"the router is unavailable": {[]client.Object{router}, []client.Object{router}, false, semmoev1.ComponentRouter},
		"stale cache":               {[]client.Object{engines}, []client.Object{router}, false, semmoev1.ComponentRouter},
		"very stale cache":          {nil, []client.Object{engines}, false, semmoev1.ComponentRouter},
	} {
		f := &Front{Client: moedtest.Cluster(t, tc.cached...), Live: moedtest.Cluster(t, tc.live...)}
		if got, err := f.serviceTarget(context.Background(), moedtest.Deployment(), tc.serves); err != nil || got != tc.want {
			t.Errorf("%s: target %q, error %v, want %q", name, got, err, tc.want)
		}
	}
}

// A router is created only if the latest spec needs it.
func TestRouterIsMadeByTheLatestSpec(t *testing.T) {
	moed := moedtest.Deployment()
	for generation, want := range map[int64]bool{moed.Generation: true, moed.Generation + 1: false} {
		made := false
		c := interceptor.NewClient(moedtest.Cluster(t, moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Generation = generation })), interceptor.Funcs{
			Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
				made = true
				return nil
			},
		})
		policy := networkPolicies(moed, semmoev1.ComponentRouter, "", Engines{})[desired.RouterName(moed)]
		err := childobjects.EnsureLatest(context.Background(), c, c, moed, &networkingv1.NetworkPolicy{}, policy, networkingac.ExtractNetworkPolicy)
		if err != nil || made != want {
			t.Errorf("generation %d of 1 seen: made %v, want %v; %v", generation, made, want, err)
		}
	}
}

// A router is deleted only if the latest spec does not need it.
func TestRouterIsDeletedByTheLatestSpec(t *testing.T) {
	moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeNone })
	router := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: desired.RouterName(moed), OwnerReferences: ownership.ControllerReference(moed, "MoEDeployment"),
	}}
	for generation, want := range map[int64]bool{moed.Generation: true, moed.Generation + 1: false} {
		latest := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Generation = generation })
		c := moedtest.Cluster(t, router.DeepCopy(), latest)
		f := &Front{Client: c, Live: c}
		if err := f.deleteRouter(context.Background(), moed); err != nil {
			t.Fatal(err)
		}
		err := c.Get(context.Background(), client.ObjectKeyFromObject(router), &appsv1.Deployment{})
		if gone := apierrors.IsNotFound(err); gone != want {
			t.Errorf("generation %d of 1 seen: deleted %v (%v), want %v", generation, gone, err, want)
		}
	}
}
