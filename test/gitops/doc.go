// SPDX-License-Identifier: Apache-2.0

// Package gitops tests how GitOps tools evaluate the operator's objects. It runs the health checks for Argo CD in
// config/argocd over objects that the end-to-end suite recorded in every state, and compares the results with those of
// kstatus and kubectl.
package gitops
