// SPDX-License-Identifier: Apache-2.0

// Package model computes the forward pass of a Qwen3-MoE language model in float32.
//
// Invariants:
//   - Every output element is one sum in one fixed order. It does not depend on the batch, the chunking of a prompt,
//     the number of workers, or the split between cache and new tokens. Experts are summed in the order of their gate
//     weights. The logits and routes of a sequence are bitwise reproducible.
//   - A Model is immutable and shared. A Runner owns scratch memory and serves one Step at a time. A Cache belongs to
//     one sequence.
//   - The shapes and the numbers of MoE layers and experts are validated at load time. Step validates tokens and
//     capacity before it computes, so that it advances either all caches or none.
package model
