// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// unsupported returns the feature of the container or pod that this node does not support, or "" if all are supported.
// Running such a container would silently ignore a part of its specification.
func unsupported(pod *corev1.Pod, c *corev1.Container) string {
	if reason := unsupportedPod(&pod.Spec); reason != "" {
		return reason
	}
	if s := c.SecurityContext; s != nil && isTrue(s.Privileged) {
		return "securityContext.privileged"
	}
	if len(c.VolumeDevices) > 0 {
		return "volumeDevices"
	}
	if c.RestartPolicy != nil && !isSidecar(c) || len(c.RestartPolicyRules) > 0 {
		return "restartPolicy of a container, other than Always of an init container"
	}
	for _, p := range c.Ports {
		if p.HostPort != 0 {
			return "hostPort"
		}
	}
	for name, probe := range map[string]*corev1.Probe{
		"startupProbe": c.StartupProbe, "readinessProbe": c.ReadinessProbe, "livenessProbe": c.LivenessProbe,
	} {
		if probe != nil && probe.HTTPGet == nil && probe.TCPSocket == nil {
			return name + " other than httpGet and tcpSocket"
		}
	}
	if l := c.Lifecycle; l != nil {
		if l.PostStart != nil {
			return "lifecycle.postStart"
		}
		if l.PreStop != nil && l.PreStop.HTTPGet == nil && l.PreStop.Sleep == nil {
			return "lifecycle.preStop other than httpGet and sleep"
		}
		if l.StopSignal != nil {
			return "lifecycle.stopSignal"
		}
	}
	return ""
}

func unsupportedPod(spec *corev1.PodSpec) string {
	switch {
	case spec.HostNetwork:
		return "hostNetwork"
	case spec.HostPID:
		return "hostPID"
	case spec.HostIPC:
		return "hostIPC"
	case isTrue(spec.ShareProcessNamespace):
		return "shareProcessNamespace"
	case len(spec.HostAliases) > 0:
		return "hostAliases"
	case spec.DNSConfig != nil:
		return "dnsConfig"
	}
	for _, v := range spec.Volumes {
		s := v.VolumeSource
		if s.ConfigMap == nil && s.Secret == nil && s.EmptyDir == nil && s.HostPath == nil &&
			s.PersistentVolumeClaim == nil && s.Projected == nil && s.DownwardAPI == nil {
			return fmt.Sprintf("the kind of volume %s", v.Name)
		}
	}
	return ""
}
