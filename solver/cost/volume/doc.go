// Package volume counts what the dispatch and the combination of a MoE layer send between ranks, under each objective of a placement: how many
// messages and bytes pass which links, and what the busiest rank sends and receives.
//
// Invariants:
//   - What is sent is received: both sum to the same total, class by class.
//   - Between nodes NodeDedup ≤ RankDedup ≤ Activation, token by token, and Hierarchical = NodeDedup. Within a node of all ranks
//     Hierarchical = RankDedup.
//   - Counts depend on the tokens of a batch, and not on their order.
package volume
