// Package simulate serves requests on modelled machines: continuous batching with chunked prefill, step by step, in discrete events. Experts are those
// of a routing trace, placements and dispatch those of given methods, and times those of a hardware profile.
//
// A step of the engine takes every lane's batch through all layers. With attention data parallelism each rank is a lane of its own, and all ranks
// step together, as each MoE layer exchanges tokens among them; with tensor parallelism all ranks have one lane. In every layer the slowest
// rank decides: of attention, of each exchange, and of the experts' products.
//
// Left out are embeddings, the output layer, sampling, the scheduler's own time, caches of prefixes, and kernels that slow each other down.
// Nothing overlaps: a step takes the sum of its stages.
//
// Invariants:
//   - Every token of a request is computed once in each layer, and every request ends.
//   - All methods see the same requests at the same times.
//   - A result is a function of its arguments: no clock, no chance but that of the seed, and no matter how many processors there are.
//   - Times inside are in microseconds; results are in milliseconds and seconds, as their names say.
package simulate
