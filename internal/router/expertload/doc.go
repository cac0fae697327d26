// SPDX-License-Identifier: Apache-2.0

// Package expertload measures how evenly sampled requests use the experts of a model. The load of an expert is the
// number of its activations divided by the mean over the experts of its layer. Experts are counted by logical id,
// whichever copy is used.
//
// Invariants:
//   - The number of series does not depend on the model: a histogram over all experts, one gauge for each of at most four groups
//     of layers, and gauges for a bounded number of experts at either end of the ranking. The series of an expert that is no
//     longer at an end disappear at the next scrape.
//   - A layer is not reported before its experts have enough activations: few activations look uneven by chance.
package expertload
