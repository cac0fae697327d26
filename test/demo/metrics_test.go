// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestTargets checks that only running pods of the operator are targets, with the labels of production series.
func TestTargets(t *testing.T) {
	pod := func(namespace, name string, phase corev1.PodPhase, labels map[string]string) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}, Status: corev1.PodStatus{Phase: phase}}
	}
	router := map[string]string{"semmoe.io/component": "router", "semmoe.io/deployment": "m"}
	leaving := pod("demo", "r-2", corev1.PodRunning, router)
	leaving.DeletionTimestamp = &metav1.Time{}
	s := &metricsServer{address: "127.0.0.1:9999"}
	got := s.targetsOf([]corev1.Pod{
		pod("demo", "r-0", corev1.PodRunning, router),
		pod("demo", "r-1", corev1.PodPending, router),
		leaving,
		pod("demo", "e-0", corev1.PodRunning, map[string]string{"semmoe.io/component": "engine", "semmoe.io/deployment": "m"}),
		pod("semmoe-system", "semmoe-manager-0", corev1.PodRunning, map[string]string{"app.kubernetes.io/component": "manager"}),
		pod("kube-system", "other", corev1.PodRunning, nil),
	})
	want := []target{
		{[]string{"127.0.0.1:9999"}, map[string]string{
			"__metrics_path__": "/pods/demo/r-0/metrics", "job": "semmoe-router", "namespace": "demo", "pod": "r-0", "instance": "r-0", "name": "m",
		}},
		{[]string{"127.0.0.1:9999"}, map[string]string{
			"__metrics_path__": "/pods/semmoe-system/semmoe-manager-0/metrics", "job": "semmoe-manager", "namespace": "semmoe-system", "pod": "semmoe-manager-0",
			"instance": "semmoe-manager-0",
		}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("targets (-want +got):\n%s", diff)
	}
}
