// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"net"
	"testing"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// FuzzAnnotations reads arbitrary annotations of a ready pod. The number of ranks is bounded, each rank has an
// endpoint, and a pod that is served with fewer ranks than it declares has a problem to report.
func FuzzAnnotations(f *testing.F) {
	f.Add("30000", "4", "", "", "", "", "https")
	f.Add("30000", "2", "30000,30001", "30001", `{"layers":2,"experts":4}`, "00", "")
	f.Add("0", "3000000", ",", "", "{", "x", "http")
	f.Add("65536", "-1", "1,2,3", "1", "[]", "", "ftp")
	f.Fuzz(func(t *testing.T, port, ranks, rankPorts, activePorts, shape, digest, scheme string) {
		pod := enginePod("p", func(p *corev1.Pod) {
			for name, value := range map[string]string{
				semmoev1.AnnotationPort: port, semmoev1.AnnotationRanks: ranks, semmoev1.AnnotationRankPorts: rankPorts, annotationActivePorts: activePorts,
				semmoev1.AnnotationModelShape: shape, semmoev1.AnnotationPlanDigest: digest, semmoev1.AnnotationScheme: scheme,
			} {
				if delete(p.Annotations, name); value != "" {
					p.Annotations[name] = value
				}
			}
		})
		problem := Problem(pod)
		if len(problem) > 400 {
			t.Errorf("the problem has %d bytes", len(problem))
		}
		backend, serves := backendOf(pod)
		if !serves {
			return
		}
		if backend.TLS != (scheme == "https") || scheme != "" && scheme != "http" && scheme != "https" {
			t.Errorf("scheme %q serves with TLS %t", scheme, backend.TLS)
		}
		if backend.Ranks < 0 || backend.Ranks > MaxRanks || backend.RankAddresses != nil && len(backend.RankAddresses) != backend.Ranks {
			t.Fatalf("%d ranks at %q", backend.Ranks, backend.RankAddresses)
		}
		if ranks != "" && ranks != "0" && backend.Ranks == 0 && problem == "" {
			t.Errorf("ranks %q, ports %q serve without ranks and without a problem", ranks, rankPorts)
		}
		for _, address := range append(backend.RankAddresses, backend.Address) {
			if address == "" {
				continue // the rank is inactive
			}
			if host, _, err := net.SplitHostPort(address); err != nil || host != pod.Status.PodIP {
				t.Errorf("address %q of a pod at %s", address, pod.Status.PodIP)
			}
		}
		if backend.Shape != nil && backend.Shape.Validate() != nil {
			t.Errorf("shape %q is taken", shape)
		}
	})
}
