// SPDX-License-Identifier: Apache-2.0

package front

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/ownership"
)

// The request router uses the pull policy of the operator's image. Without a policy the field is not set, so that
// existing Deployments are not rewritten.
func TestRouterPullPolicy(t *testing.T) {
	moed := moedtest.Deployment()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: moed.Namespace, Name: desired.RouterName(moed), UID: "uid", Labels: ownership.OperatorLabels()}}
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

// While the store's certificate authority is not published, routers keep their current one.
func TestStoreAuthority(t *testing.T) {
	planned := moedtest.Deployment(func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = &semmoev1.ProfilingSpec{} })
	ca := types.NamespacedName{Namespace: "semmoe-system", Name: "semmoe-store-ca"}
	published := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ca.Namespace, Name: ca.Name}, Data: map[string]string{"ca.crt": "new"}}
	router := func(given string) client.Object {
		intent := routerDeployment(planned, "semmoe:1", "uid", "PEM")
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
		"store removed":              {planned, "", []client.Object{published, router("old")}, ""},
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

// Every field of spec.routing.template reaches the pods, in both modes. Without the field, router pods do not inherit
// scheduling from spec.template.
func TestRouterTemplate(t *testing.T) {
	toleration := corev1.Toleration{Key: "dedicated", Operator: corev1.TolerationOpExists}
	byZone := corev1.TopologySpreadConstraint{MaxSkew: 1, TopologyKey: corev1.LabelTopologyZone, WhenUnsatisfiable: corev1.DoNotSchedule}
	byHost := corev1.TopologySpreadConstraint{
		MaxSkew: 2, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.DoNotSchedule, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}},
	}
	affinity := &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "cpu", Operator: corev1.NodeSelectorOpExists}}}},
	}}}
	for _, mode := range []semmoev1.RoutingMode{semmoev1.RoutingModeRouter, semmoev1.RoutingModeEndpointPicker} {
		moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
			m.Spec.Routing.Mode = mode
			m.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				NodeSelector: map[string]string{"gpu": "h100"}, Tolerations: []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists}},
			}}
		})
		pod := func() corev1.PodTemplateSpec {
			account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: moed.Namespace, Name: desired.RouterName(moed), UID: "uid", Labels: ownership.OperatorLabels()}}
			c := moedtest.Cluster(t, moed, account)
			if _, err := (&Front{Client: c, Live: c, Image: "semmoe:1"}).reconcileRouter(t.Context(), moed); err != nil {
				t.Fatal(err)
			}
			deployment := &appsv1.Deployment{}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(account), deployment); err != nil {
				t.Fatal(err)
			}
			return deployment.Spec.Template
		}
		plain := pod()
		if plain.Spec.NodeSelector != nil || plain.Spec.Tolerations != nil || len(plain.Spec.TopologySpreadConstraints) != 1 {
			t.Errorf("%s: without a template: %v, %v, %v", mode, plain.Spec.NodeSelector, plain.Spec.Tolerations, plain.Spec.TopologySpreadConstraints)
		} else if keys := plain.Spec.TopologySpreadConstraints[0].MatchLabelKeys; !slices.Equal(keys, []string{"pod-template-hash"}) {
			t.Errorf("%s: the default constraint counts pods with the same %v, want only those of one revision", mode, keys)
		}
		moed.Spec.Routing.Template = &semmoev1.RouterTemplate{
			Metadata: semmoev1.RouterTemplateMetadata{Labels: map[string]string{"team": "a"}, Annotations: map[string]string{"note": "b"}},
			Spec: semmoev1.RouterTemplateSpec{
				NodeSelector: map[string]string{"pool": "cpu"}, Tolerations: []corev1.Toleration{toleration}, Affinity: affinity,
				TopologySpreadConstraints: []corev1.TopologySpreadConstraint{byZone, byHost}, PriorityClassName: "high",
				Containers: []semmoev1.RouterContainer{{Name: "router", Resources: semmoev1.RouterResources{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceEphemeralStorage: resource.MustParse("1Gi")},
					Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("4Gi")},
				}}},
			},
		}
		before := moed.DeepCopy()
		got := pod()
		want := plain.DeepCopy()
		want.Labels["team"], want.Annotations["note"] = "a", "b"
		byZone.LabelSelector = &metav1.LabelSelector{MatchLabels: desired.Selector(moed, semmoev1.ComponentRouter)}
		byZone.MatchLabelKeys = []string{"pod-template-hash"}
		want.Spec.NodeSelector, want.Spec.Tolerations, want.Spec.Affinity = map[string]string{"pool": "cpu"}, []corev1.Toleration{toleration}, affinity
		want.Spec.TopologySpreadConstraints, want.Spec.PriorityClassName = []corev1.TopologySpreadConstraint{byZone, byHost}, "high"
		byZone.LabelSelector, byZone.MatchLabelKeys = nil, nil
		resources := want.Spec.Containers[0].Resources
		resources.Requests[corev1.ResourceCPU], resources.Requests[corev1.ResourceEphemeralStorage] = resource.MustParse("2"), resource.MustParse("1Gi")
		resources.Limits[corev1.ResourceMemory] = resource.MustParse("4Gi")
		if diff := cmp.Diff(want, &got, cmp.Comparer(resource.Quantity.Equal)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", mode, diff)
		}
		if diff := cmp.Diff(before, moed); diff != "" {
			t.Errorf("%s: the spec was changed:\n%s", mode, diff)
		}
	}
}
