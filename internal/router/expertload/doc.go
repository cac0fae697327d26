// Package expertload measures how evenly sampled requests use the experts of a model. The load of an expert is the number of its activations
// over the mean of its layer's experts, by logical ids: where a copy lies does not matter.
//
// Invariants:
//   - The number of series does not depend on the model: a histogram over all experts, a gauge for each of at most four groups of layers, and
//     gauges for a bounded number of experts at either end. The series of an expert that is no longer at an end are gone at the next scrape.
//   - Nothing is reported of a layer before its experts have some activations each: few activations look uneven by chance.
package expertload
