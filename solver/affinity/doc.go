// Package affinity turns routing traces into what the solver and the request router work with: how often each token id
// or request activated each expert, and the forecast tables that follow from these counts and a placement.
//
// Invariants:
//   - Counts are sums: those of two disjoint sets of requests merge into those of their union, whatever the order.
//   - A forecast looks only at what is known before the gates have run. It is built from train requests alone and is used
//     in the quantised form in which a plan stores it, so that a stored plan scores exactly as it did when it was solved.
//   - Scores are expected shares of activations that would be local: between 0 and 1, and without redundant experts they
//     sum to 1 over the ranks.
package affinity
