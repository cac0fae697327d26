// Package lar measures the local activation rate (LAR): the share of activations, (token, layer, chosen expert) triples of
// routed experts, whose expert has a copy on the rank that serves the token.
//
// Invariants:
//   - It is pure: no clock, no network, no randomness. Times are arguments.
//   - A request is the unit of chance: tokens of one request are alike, so standard errors are those of a ratio of sums over
//     requests, not of single activations.
//   - Sketches are sums. Merging adds, in any order and grouping, and what is merged is what one sketch of all requests would
//     hold.
//   - What was decoded is validated before anything is made of it: it comes from another process.
package lar
