// SPDX-License-Identifier: Apache-2.0

// Package solver is the solver library of the Sem-MoE operator. It turns a routing trace into a plan: a placement of
// experts on ranks, and tables that forecast the best rank of a token or request. It also scores the plan on held-out
// requests. It imports no Kubernetes package and no other package of the operator.
//
// Invariants:
//   - Solve is deterministic in trace and options: it returns the same plan on every machine of one architecture,
//     for every number of processors, unless the time budget cuts the search off.
//   - Training and evaluation never share a document.
//   - Documents of the train part decide between a solved placement and the default one. The held-out requests score
//     a plan; they never select it. If there is no gain, the solution reports that. The only exception is Replan,
//     which selects one of three plans by the held-out requests.
package solver
