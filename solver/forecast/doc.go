// SPDX-License-Identifier: Apache-2.0

// Package forecast predicts the shares of a token's activations per rank, with attention tensor parallelism, from all
// information available before a layer's gate runs: the token and the previous token, the text so far, the experts that
// the token activated in earlier layers, and, during decoding, the routes of earlier positions.
//
// The model is log-linear. Each source of evidence is a vector of shares per rank. Its logarithm enters with a learnt
// weight. The experts of earlier layers add a learnt vector each. A softmax converts the sum into shares. Tables
// contain counts. Weights are trained on documents after removal of their own counts from the tables: a token that
// occurs in one document only is as unknown in training as in service.
//
// LookAhead is another model, for engines that can apply a layer's gate before its attention: it corrects the
// prediction of the gate. LookBack is the smallest model, for engines that know only the rank that held most of a
// token's experts in earlier layers.
//
// Invariants:
//   - A score uses only information that is available to this kind of forecast: never the routes of the current or
//     later layers, never the routes of later positions, and with history never later tokens.
//   - Training depends only on trace, requests and placement, not on the number of processors.
//   - A model computes scores from the form in which a plan stores it.
package forecast
