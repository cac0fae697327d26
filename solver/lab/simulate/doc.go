// SPDX-License-Identifier: Apache-2.0

// Package simulate simulates serving on modelled hardware: continuous batching with chunked prefill, step by step, as
// discrete events. The activated experts come from a routing trace, placements and dispatch from the given methods, and
// times from a hardware profile.
//
// A step of the engine takes the batch of every lane through all layers. With attention data parallelism each rank is a
// lane, and all ranks step together, because each MoE layer exchanges tokens among them. With tensor parallelism all
// ranks form one lane. In every layer the slowest rank determines the time of attention, of each exchange, and of the
// experts' products.
//
// The model omits embeddings, the output layer, sampling, scheduling time, prefix caches, and kernels that slow each
// other down. Nothing overlaps: a step takes the sum of its stages.
//
// Invariants:
//   - Every token of a request is computed once in each layer, and every request ends.
//   - All methods receive the same requests at the same times.
//   - A result depends only on the arguments, including the seed, not on the clock or the number of processors.
//   - Internal times are in microseconds; results are in milliseconds and seconds, as their names state.
package simulate
