// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"runtime"
	"time"

	coordv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/semmoe/operator/test/load"
)

const (
	leaseDuration = 40 * time.Second
	leaseInterval = 10 * time.Second
	// leaseTimeout bounds one request for the lease. The next attempt follows immediately.
	leaseTimeout = 10 * time.Second
	// maxPods exceeds the kubelet's default of 110, because the namespaces of a test suite keep their pods until the
	// cluster ends.
	maxPods     = 500
	gpuResource = "nvidia.com/gpu"
)

// allocatable returns the resources that the node advertises. All values except the GPUs are arbitrary and large:
// nothing is enforced, and scheduling tests must not depend on the machine that runs them. Such tests count GPUs.
func allocatable(gpus int) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("64"),
		corev1.ResourceMemory:           resource.MustParse("256Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("256Gi"),
		corev1.ResourcePods:             *resource.NewQuantity(maxPods, resource.DecimalSI),
		gpuResource:                     *resource.NewQuantity(int64(gpus), resource.DecimalSI),
	}
}

// register creates the Node object and starts to renew its lease.
func register(ctx context.Context, client kubernetes.Interface, name, address string, resources corev1.ResourceList) error {
	version, err := client.Discovery().ServerVersion()
	if err != nil {
		return err
	}
	node, err := client.CoreV1().Nodes().Create(ctx, nodeObject(name, address, version.GitVersion, resources, time.Now()), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("failed to register node %s: %w", name, err)
	}
	// Every new node has a not-ready taint until a controller has checked it. This node is ready from the start.
	node.Spec.Taints = nil
	if _, err := client.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("failed to register node %s: %w", name, err)
	}
	go keepLease(ctx, client, node)
	return nil
}

func nodeObject(name, address, version string, resources corev1.ResourceList, now time.Time) *corev1.Node {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			corev1.LabelHostname:   name,
			corev1.LabelOSStable:   runtime.GOOS,
			corev1.LabelArchStable: runtime.GOARCH,
		}},
		Status: corev1.NodeStatus{
			Capacity:    resources,
			Allocatable: resources,
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: address},
				{Type: corev1.NodeHostName, Address: name},
			},
			NodeInfo: corev1.NodeSystemInfo{
				KubeletVersion:          version,
				OperatingSystem:         runtime.GOOS,
				Architecture:            runtime.GOARCH,
				ContainerRuntimeVersion: "local://1",
			},
		},
	}
	for kind, status := range map[corev1.NodeConditionType]corev1.ConditionStatus{
		corev1.NodeReady:          corev1.ConditionTrue,
		corev1.NodeMemoryPressure: corev1.ConditionFalse,
		corev1.NodeDiskPressure:   corev1.ConditionFalse,
		corev1.NodePIDPressure:    corev1.ConditionFalse,
	} {
		node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{
			Type: kind, Status: status, Reason: "LocalNode", LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(now),
		})
	}
	return node
}

// keepLease renews the node's lease until ctx ends. The node controller uses the lease as the heartbeat.
func keepLease(ctx context.Context, client kubernetes.Interface, node *corev1.Node) {
	for {
		wait := leaseInterval
		if err := renewLease(ctx, client, node); err != nil {
			klog.InfoS("Failed to renew the lease of the node, retrying", "err", err)
			wait = retryInterval
		}
		if !sleep(ctx, wait) {
			return
		}
	}
}

// renewLease writes the current time into the node's lease, and creates the lease if it is missing.
func renewLease(ctx context.Context, client kubernetes.Interface, node *corev1.Node) error {
	ctx, cancel := context.WithTimeout(ctx, load.Scale(leaseTimeout))
	defer cancel()
	leases := client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	now := metav1.NewMicroTime(time.Now())
	lease, err := leases.Get(ctx, node.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = leases.Create(ctx, &coordv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: node.Name, OwnerReferences: []metav1.OwnerReference{
				{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID},
			}},
			Spec: coordv1.LeaseSpec{
				HolderIdentity: &node.Name, LeaseDurationSeconds: ptr.To(int32(leaseDuration / time.Second)), RenewTime: &now,
			},
		}, metav1.CreateOptions{})
	case err == nil:
		lease.Spec.RenewTime = &now
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	return err
}
