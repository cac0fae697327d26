// SPDX-License-Identifier: Apache-2.0

// Package shuffle is a consumer of the tables of a plan, for attention tensor parallelism: it selects the rank of each
// token in each layer, as an engine does between the attention of a layer and its experts. docs/token-shuffle.md is its
// contract.
//
// Invariants:
//   - The selection only uses information that is available before the gate of the layer runs: the token, its
//     look-ahead, and its experts in earlier layers.
//   - All ranks get equally many rows of each step. A step whose tokens do not fill the ranks is padded.
//   - Ranks are logical: the selection determines which activations count as local, and does not change outputs.
//   - Tables that do not fit are refused with a reason. A refusal never ends serving, nor the use of earlier tables.
package shuffle
