// Package trace reads, writes, splits and samples routing traces: which experts each token of a set of requests
// activated in each MoE layer.
//
// A trace is a safetensors file, plain or zstd-compressed (docs/formats.md). Invariants:
//   - A Trace that Read returns is consistent: every token id is below the vocabulary, every expert id below the number
//     of experts, no token names an expert twice in one layer, requests are non-empty and cover all tokens in order.
//   - The file is read once, front to back. What is allocated follows the bytes that were really read, never a size that
//     the header merely claims.
//   - A fault of the file (what no retry can cure) is an *InvalidError; every other error is I/O.
//   - Everything random takes a seed and gives the same result on every machine.
package trace
