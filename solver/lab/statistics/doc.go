// SPDX-License-Identifier: Apache-2.0

// Package statistics describes a routing trace by the statistics used in publications on Mixture-of-Experts scheduling:
// how well a token's experts can be predicted, which experts are activated together, and how earlier layers predict
// later ones.
//
// Invariants:
//   - Predictions are learnt from train requests and measured on test requests.
//   - Shares are between 0 and 1. A share that is meaningful only relative to chance is reported together with the
//     value of chance.
package statistics
