// SPDX-License-Identifier: Apache-2.0

// Package checkpoint reads Hugging Face checkpoints of MoE models: config.json, the safetensors index and the shards.
//
// Invariants:
//   - No input is trusted: a header is accepted only if every byte range is inside the file, the ranges neither overlap
//     nor leave holes, and the length of each range is shape times dtype. No allocation exceeds the size of the file
//     that is read.
//   - Opening a checkpoint reads only headers, never weights. It checks that index and shards list the same tensors.
//   - An error of the checkpoint itself, which a retry cannot fix, is an *InvalidError. Every other error is an I/O
//     error and may be transient.
package checkpoint
