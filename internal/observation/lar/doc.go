// SPDX-License-Identifier: Apache-2.0

// Package lar measures the local activation rate (LAR): the share of activations whose expert has a copy on the rank
// that serves the token. An activation is a triple (token, layer, chosen expert) of a routed expert.
//
// Invariants:
//   - The package is pure: no clock, no network, no randomness. Times are arguments.
//   - The statistical unit is a request: tokens of one request are correlated, so standard errors are those of a ratio
//     of sums over requests, not over single activations.
//   - Sketches are sums. Merging adds, in any order and grouping, and gives the same result as one sketch of all
//     requests.
//   - Decoded data is validated before use: it comes from another process.
package lar
