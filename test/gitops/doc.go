// SPDX-License-Identifier: Apache-2.0

// Package gitops tests how GitOps tools evaluate the operator's objects. It runs the health checks and the actions for
// Argo CD in config/argocd over objects that the end-to-end suite recorded in every state, and compares the results of
// the checks with those of kstatus and kubectl.
package gitops
