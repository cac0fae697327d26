// SPDX-License-Identifier: Apache-2.0

// Package reshuffle writes a copy of a checkpoint in which the experts of some layers are permuted. The rows of the
// layers' gates are permuted in the same way. The model computes the same outputs, and an engine with the plain linear
// expert layout serves a plan.
//
// Invariants:
//   - Where every expert has its own tensors, names are permuted and bytes stay in place: the header of a shard's copy
//     maps the new names to the old ranges. Only gates and fused tensors are gathered along dimension 0.
//   - The checkpoint, the permutation and the configuration are checked against each other before anything is written.
//   - The output gets its final name only after it is complete, verified and on disk. Until then, it is in a hidden
//     staging directory next to the final path. A later run resumes from that directory.
//   - A second run on the same input finds the manifest and writes only the time of use. If files of the model have
//     changed that its digest does not cover, the run replaces them, each one atomically.
//   - An output is locked without a gap from before it exists until its lease ends.
//   - The limit on the outputs of a directory holds at every moment: each run reserves its space before it writes,
//     except for the files that it replaces. A run never removes an output that is leased, an output that another run
//     is writing, or a file that this package did not create.
//   - Memory use depends on the number of tensors, not on the size of the weights.
package reshuffle
