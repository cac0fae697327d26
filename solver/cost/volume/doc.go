// SPDX-License-Identifier: Apache-2.0

// Package volume counts the traffic of dispatch and combine of a MoE layer between ranks, for each objective of a
// placement: the messages and bytes on each class of links, and the maximum that a rank sends and receives.
//
// Invariants:
//   - Sent and received totals are equal for each class.
//   - Between nodes NodeDedup ≤ RankDedup ≤ Activation, token by token, and Hierarchical = NodeDedup. If one node
//     contains all ranks, Hierarchical = RankDedup.
//   - Counts depend on the tokens of a batch, but not on their order.
package volume
