// Package reshuffle writes a copy of a checkpoint in which the experts of some layers have another order, and the rows
// of their gates with them, so that the model computes the same and an engine with the plain linear expert layout
// serves a plan.
//
// Invariants:
//   - Where every expert has tensors of its own, names are permuted and bytes are not: a shard's copy has a header whose
//     names point at the old ranges. Only gates, and fused tensors, are gathered along dimension 0.
//   - Nothing is written before checkpoint, permutation and configuration have been found to fit one another.
//   - The output has its final name only when it is complete, verified and on disk. Until then it is a hidden directory
//     beside it, in which a later run goes on.
//   - A second run on the same input finds the manifest and writes nothing but the time of use. Where files of the model have changed that
//     are no part of its digest, it replaces them, each as a whole.
//   - From before an output is there until its hold ends, it is locked without a gap.
//   - A limit on the outputs of a directory holds at every moment: each run reserves its room before it writes,
//     but for the files that it replaces. Nothing is removed that is held, that a run is at work on, or that this package has not made.
//   - Memory does not grow with the size of the weights, only with the number of tensors.
package reshuffle
