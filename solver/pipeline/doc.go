// Package pipeline schedules the work inside MoE layers whose attention and experts are on disaggregated groups of ranks (FinDEP, arXiv
// 2512.21487): a rank of the attention group works on micro-batches, whose tokens go to the expert group and come back in chunks.
//
// There are four resources, each with one task at a time: the attention group, the links to and from the expert group, and the expert
// group. Within a group all ranks do the same at the same time, so that one timeline stands for all of them. Times are in microseconds.
//
// Invariants:
//   - A makespan by closed form or recurrence is that of the simulator, which shares no code with them.
//   - No schedule that Search returns is slower than the pipeline of micro-batches alone (PPPipe), or than none.
//   - No order of the attention group's tasks has a makespan below Bound.
//   - Everything is a function of its arguments: no clock, no chance.
package pipeline
