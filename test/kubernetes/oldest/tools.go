// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package oldest pins the oldest Kubernetes release that the operator takes. It is a separate module, next to the one of the release
// that all tests run against: the two need other versions of the same modules.
package oldest

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
