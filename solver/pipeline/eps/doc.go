// SPDX-License-Identifier: Apache-2.0

// Package eps contains the formulas of EPS-MoE (arXiv 2410.12247): a rank processes its experts in N groups, so that
// the exchange of one group overlaps with the products of another. Times are in microseconds.
//
// All formulas take measured times as input. The paper's formulas assume that overlapping kernels do not slow each
// other down. Contention models the slowdown: it is fitted to layers measured in pieces, and chooses the number of
// pieces.
package eps
