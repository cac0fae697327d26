// SPDX-License-Identifier: Apache-2.0

package front

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/podhealth"
)

// Engines are the existing workloads and pods of revisions. They may belong to an older spec than the current one.
type Engines struct {
	Workloads []*revisions.Workload
	// Pods are the pods that serve requests. A pod is ready while its replica is.
	Pods []*corev1.Pod
}

// ports returns the ports that engines serve on now, or will, in ascending order.
func (e Engines) ports(moed *semmoev1.MoEDeployment) []int32 {
	ports := []int32{moed.Spec.Engine.Port}
	add := func(annotations map[string]string) {
		if port := servingPort(annotations); port != 0 {
			ports = append(ports, port)
		}
	}
	for _, workload := range e.Workloads {
		if replicas := workload.Replicas(); replicas == nil || *replicas > 0 {
			add(workload.Template().Annotations)
		}
	}
	for _, pod := range e.Pods {
		add(pod.Annotations)
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// port returns the port that most ready pods serve on. In a tie, the spec's port comes last, because pods of a new
// revision join those that already serve.
func (e Engines) port(moed *semmoev1.MoEDeployment) int32 {
	ready := map[int32]int{}
	for _, pod := range e.Pods {
		if pod.DeletionTimestamp == nil && podhealth.Ready(pod) {
			ready[servingPort(pod.Annotations)]++
		}
	}
	best := moed.Spec.Engine.Port
	for _, port := range e.ports(moed) {
		if n := ready[port]; n > ready[best] || n > 0 && n == ready[best] && best == moed.Spec.Engine.Port {
			best = port
		}
	}
	return best
}

// withTLS returns the MoEDeployment with the Secret of engines that still serve TLS after spec.engine.tls was removed:
// request routers verify them until they are replaced.
func (e Engines) withTLS(moed *semmoev1.MoEDeployment) *semmoev1.MoEDeployment {
	if moed.Spec.Engine.TLS != nil {
		return moed
	}
	for _, workload := range e.Workloads {
		if replicas := workload.Replicas(); replicas != nil && *replicas == 0 {
			continue
		}
		for _, volume := range workload.Template().Spec.Volumes {
			if volume.Name == semmoev1.EngineTLSVolume && volume.Secret != nil {
				kept := *moed
				kept.Spec.Engine.TLS = &semmoev1.EngineTLS{SecretName: volume.Secret.SecretName}
				return &kept
			}
		}
	}
	return moed
}

// servingPort returns the port in a pod's annotations, or 0.
func servingPort(annotations map[string]string) int32 {
	port, err := strconv.ParseUint(annotations[semmoev1.AnnotationPort], 10, 16)
	if err != nil {
		return 0
	}
	return int32(port)
}
