// SPDX-License-Identifier: Apache-2.0

package front

import (
	"slices"
	"strconv"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// During a rollout to another port, the port of the serving pods is protected, and configured in the InferencePool.
func TestPortsOfEngines(t *testing.T) {
	annotations := func(port int) map[string]string {
		return map[string]string{semmoev1.AnnotationPort: strconv.Itoa(port)}
	}
	on := func(port int, change ...func(*corev1.Pod)) *corev1.Pod {
		return moedtest.Pod("p", "r", append(change, func(p *corev1.Pod) { p.Annotations = annotations(port) })...)
	}
	going := func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: moedtest.Start} }
	workload := func(port int, replicas *int32) *revisions.Workload {
		template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: annotations(port)}}
		return revisions.StatefulSet(&appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Replicas: replicas, Template: template}})
	}
	for name, tc := range map[string]struct {
		engines Engines
		ports   []int32
		port    int32
	}{
		"nothing yet":                            {Engines{}, []int32{30000}, 30000},
		"only the spec's port":                   {Engines{Pods: []*corev1.Pod{on(30000), on(30000)}}, []int32{30000}, 30000},
		"only the former port":                   {Engines{Pods: []*corev1.Pod{on(29000), on(29000)}}, []int32{29000, 30000}, 29000},
		"first pod on the new port":              {Engines{Pods: []*corev1.Pod{on(30000), on(31000), on(31000)}}, []int32{30000, 31000}, 31000},
		"same number on both":                    {Engines{Pods: []*corev1.Pod{on(30000), on(31000)}}, []int32{30000, 31000}, 31000},
		"same number on both, new port is lower": {Engines{Pods: []*corev1.Pod{on(29000), on(30000)}}, []int32{29000, 30000}, 29000},
		"majority on the new port":               {Engines{Pods: []*corev1.Pod{on(30000), on(30000), on(31000)}}, []int32{30000, 31000}, 30000},
		"new port is not ready":                  {Engines{Pods: []*corev1.Pod{on(30000, moedtest.Unready), on(30000, moedtest.Unready), on(31000)}}, []int32{30000, 31000}, 31000},
		"former workload is scaled down":         {Engines{Pods: []*corev1.Pod{on(30000), on(31000, going), on(31000, going)}}, []int32{30000, 31000}, 30000},
		"no pod is ready":                        {Engines{Pods: []*corev1.Pod{on(31000, moedtest.Unready)}}, []int32{30000, 31000}, 30000},
		"a workload without pods":                {Engines{Workloads: []*revisions.Workload{workload(31000, ptr.To[int32](1))}}, []int32{30000, 31000}, 30000},
		"default port":                           {Engines{Workloads: []*revisions.Workload{workload(31000, nil)}}, []int32{30000, 31000}, 30000},
		"a workload with zero replicas":          {Engines{Workloads: []*revisions.Workload{workload(31000, ptr.To[int32](0))}}, []int32{30000}, 30000},
		"no port":                                {Engines{Pods: []*corev1.Pod{on(0), on(70000)}}, []int32{30000}, 30000},
	} {
		moed := moedtest.Deployment()
		if got := tc.engines.ports(moed); !slices.Equal(got, tc.ports) {
			t.Errorf("%s: ports %v, want %v", name, got, tc.ports)
		}
		if got := tc.engines.port(moed); got != tc.port {
			t.Errorf("%s: port %d, want %d", name, got, tc.port)
		}
	}
}
