// Package checkpoint reads Hugging Face checkpoints of MoE models: config.json, the safetensors index and the shards.
//
// Invariants:
//   - Nothing is trusted: a header is accepted only if every byte range it names lies inside the file, ranges neither
//     overlap nor leave holes, and each equals shape times dtype. No allocation exceeds the size of the file read.
//   - Opening a checkpoint reads headers only, never weights, and proves that index and shards name the same tensors.
//   - A fault of the checkpoint itself (what no retry can cure) is an *InvalidError; every other error is I/O and may
//     be transient.
package checkpoint
