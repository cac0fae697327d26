// SPDX-License-Identifier: Apache-2.0

// Package kubectl implements the plugin "kubectl semmoe", which inspects and changes MoEDeployments and PlacementPlans
// from a terminal.
//
// A command reads objects through the API server, passes them to one of these packages, and prints the result:
//
//	view      describes the state of a deployment, the benefit of a plan and the load of ranks
//	change    computes the patch for an approval, a rollback, a pin, a pause or a resume
//	gitops    finds the GitOps tool that would revert a change
//	terminal  formats text for terminals and pipes
//
// Invariants:
//   - Commands never prompt. Each change is one patch by the field manager kubectl-semmoe. With --dry-run=server the
//     API server validates the patch and stores nothing.
//   - Standard output contains only the answer, as text or JSON. Warnings and errors go to standard error.
//   - A missing permission removes only the parts that need it from the output, with a note. The other parts are shown.
package kubectl
