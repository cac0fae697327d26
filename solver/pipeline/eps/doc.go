// Package eps has the formulas of EPS-MoE (arXiv 2410.12247): a rank's experts are worked off in N groups, so that the exchange of one group goes
// on beside the products of another. Times are in microseconds unless said.
//
// All of it is arithmetic on given times: none of them is measured here. The paper's formulas take it that kernels that overlap do not slow
// each other down. Contention is of those that do: it is fitted to layers measured in pieces, and chooses by that.
package eps
