// Package solver is the library of the Sem-MoE operator: it turns a routing trace into a plan (which expert sits on which
// rank, and tables that forecast the best rank of a token or request) and says what the plan is worth on requests that
// it has not seen. It needs no Kubernetes and no other package of the operator.
//
// Invariants:
//   - Solve is a function of trace and options: the same plan on every machine of one architecture, whatever the number
//     of processors, unless a time budget cut the search off.
//   - No document is both learnt from and evaluated on.
//   - Whether a solved placement is taken, or the default one, is decided on documents of the train part: the held-out
//     requests judge a plan and never choose it. Where there is no gain, the solution says so. Replan alone chooses by them, among
//     three plans.
package solver
