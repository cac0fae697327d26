package front

import (
	"encoding/json"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/owned"
)

// The pull policy of our image is the request router's. Without one nothing is said of it, so that the field stays the API server's: what
// earlier versions made is not written anew.
func TestRouterPullPolicy(t *testing.T) {
	moed := moedtest.Deployment()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: moed.Namespace, Name: desired.RouterName(moed), UID: "uid", Labels: owned.Ours()}}
	for _, policy := range []corev1.PullPolicy{"", corev1.PullIfNotPresent, corev1.PullNever} {
		c := moedtest.Cluster(t, moed, account.DeepCopy())
		f := &Front{Client: c, Live: c, Image: "semmoe:1", PullPolicy: policy}
		if _, err := f.reconcileRouter(t.Context(), moed); err != nil {
			t.Fatal(err)
		}
		deployment := &appsv1.Deployment{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(account), deployment); err != nil {
			t.Fatal(err)
		}
		if got := deployment.Spec.Template.Spec.Containers[0].ImagePullPolicy; got != policy {
			t.Errorf("the router's policy is %q, want %q", got, policy)
		}
	}
}

// While the store's certificate authority is not published, routers keep the one that they have.
func TestStoreAuthority(t *testing.T) {
	planned := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = &semmoev1.ProfilingSpec{} })
	ca := types.NamespacedName{Namespace: "semmoe-system", Name: "semmoe-store-ca"}
	published := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ca.Namespace, Name: ca.Name}, Data: map[string]string{"ca.crt": "new"}}
	router := func(given string) client.Object {
		intent := routerDeployment(planned, "semmoe:1", "uid")
		if given != "" {
			giveStore(intent, &access.Access{URL: "https://store"}, given)
		}
		text, err := json.Marshal(intent)
		if err != nil {
			t.Fatal(err)
		}
		deployment := &appsv1.Deployment{}
		if err := json.Unmarshal(text, deployment); err != nil {
			t.Fatal(err)
		}
		return deployment
	}
	for situation, tc := range map[string]struct {
		moed    *semmoev1.MoEDeployment
		url     string
		objects []client.Object
		want    string
	}{
		"published":                  {planned, "https://store", []client.Object{published, router("old")}, "new"},
		"deleted":                    {planned, "https://store", []client.Object{router("old")}, "old"},
		"not yet published":          {planned, "https://store", []client.Object{router("")}, ""},
		"not yet, and no router":     {planned, "https://store", nil, ""},
		"no store any more":          {planned, "", []client.Object{published, router("old")}, ""},
		"a deployment without plans": {moedtest.Deployment(), "https://store", []client.Object{published, router("old")}, ""},
	} {
		t.Run(situation, func(t *testing.T) {
			c := fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).WithObjects(tc.objects...).Build()
			f := &Front{Client: c, Store: &access.Access{URL: tc.url, CA: ca, Reader: c}}
			if got, err := f.StoreAuthority(t.Context(), tc.moed); got != tc.want || err != nil {
				t.Errorf("got %q, %v; want %q", got, err, tc.want)
			}
		})
	}
}
