// SPDX-License-Identifier: Apache-2.0

// Package installation tests the life cycle of an installation on a real cluster: two nodes with kubelet, containerd
// and CoreDNS, created by test/cluster. Helm installs the chart, and kubectl applies the sample of the README. During
// all steps a client sends requests to the model through its DNS name and its Service. Each step reports how many
// requests failed. TestInstallation changes and breaks an installation, TestNewcomer is the path of a new user to an
// approved plan. Each test removes all its objects, so their order does not matter.
//
// The tests install and uninstall the operator, and kill processes of the cluster. They run only with -args -cluster;
// make e2e-installation creates the cluster for them.
package installation
