// SPDX-License-Identifier: Apache-2.0

// Package pipeline schedules the work inside MoE layers with attention and experts on disaggregated groups of ranks
// (FinDEP, arXiv 2512.21487). A rank of the attention group works on micro-batches. The tokens of a micro-batch go to
// the expert group and return in chunks.
//
// There are four resources with one task at a time each: the attention group, the links to and from the expert group,
// and the expert group. All ranks of a group do the same work at the same time, so one timeline represents the group.
// Times are in microseconds.
//
// Invariants:
//   - A makespan by closed form or recurrence equals the makespan of the simulator, which shares no code with them.
//   - No schedule of Search is slower than the pipeline of micro-batches only (PPPipe), or than no pipeline.
//   - No order of the attention group's tasks has a makespan below Bound.
//   - All results depend only on the arguments: no clock and no randomness.
package pipeline
