// Package kubectl is the plugin "kubectl semmoe": the daily work with MoEDeployments and PlacementPlans at a terminal.
//
// A command reads objects through the API server, has one of the packages below decide or describe, and writes the result:
//
//	view      what is so: the state of a deployment, the worth of a plan, the load of ranks
//	change    what a user's word changes
//	gitops    who would change it back
//	terminal  how text is written for people
//
// Invariants:
//   - Nothing is asked interactively. What is written is written by the field manager kubectl-semmoe, as one patch that the API server
//     applies, and with --dry-run=server to nothing.
//   - Standard output has the answer alone, in JSON where asked for; warnings and errors go to standard error.
//   - A right that is missing costs what needs it, and is told; the rest is shown.
package kubectl
