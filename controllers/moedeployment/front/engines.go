package front

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/podhealth"
)

// Engines are what there is of revisions. They may be of another spec than the present one, of which there may be nothing yet.
type Engines struct {
	Workloads []*revisions.Workload
	// Pods are those that answer requests, each ready while its replica is.
	Pods []*corev1.Pod
}

// ports are those that engines serve on, or will, in order.
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

// port is the one that most ready pods serve on. Of as many, the spec's comes last: pods of a new revision are added to those that serve.
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

// servingPort is the port that a pod's annotations tell; 0 where they tell none.
func servingPort(annotations map[string]string) int32 {
	port, err := strconv.ParseUint(annotations[semmoev1.AnnotationPort], 10, 16)
	if err != nil {
		return 0
	}
	return int32(port)
}
