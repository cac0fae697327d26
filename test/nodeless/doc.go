// SPDX-License-Identifier: Apache-2.0

// Package nodeless runs a real control plane without nodes, for tests of controllers with many objects: etcd,
// kube-apiserver and kube-controller-manager of the pinned release, unmodified, the artifact store, and an agent. The
// agent writes the status of every Sem-MoE pod as if the pod ran on a node. The package needs no root and no
// namespaces.
//
// The agent simulates only what the operator can observe. Inspections report a checkpoint with a digest of its
// location. Profiling Jobs publish a real profile. Engines return the responses on which a plan is verified. Request
// routers report stationary traffic. No model is executed. All pods are bound to one Node object that has no machine.
package nodeless
