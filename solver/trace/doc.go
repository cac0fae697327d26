// SPDX-License-Identifier: Apache-2.0

// Package trace reads, writes, splits and samples routing traces: the experts that each token of a set of requests
// activated in each MoE layer.
//
// A trace is a safetensors file, plain or zstd-compressed (docs/trace-format.md). Invariants:
//   - A Trace that Read returns is consistent: every token id is below the vocabulary size, every expert id below the
//     number of experts, no token has an expert twice in one layer, requests are non-empty and cover all tokens in
//     order.
//   - The file is read once, front to back. Allocations follow the bytes that were read, never a size that the header
//     merely claims.
//   - An invalid file, which no retry can fix, is an *InvalidError; every other error is an I/O error.
//   - All random functions take a seed and return the same result on every machine.
package trace
