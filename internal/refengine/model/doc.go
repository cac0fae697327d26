// Package model computes the forward pass of a Qwen3-MoE language model in float32.
//
// Invariants:
//   - Results do not depend on what else is computed: every output element is one sum in one fixed order, whatever the
//     batch, the chunking of a prompt, the number of workers, or the split between cache and new tokens. Experts are
//     summed in the order of their gate weights. Logits and routes of a sequence are therefore bitwise reproducible.
//   - A Model is immutable and shared. A Runner owns scratch memory and serves one Step at a time. A Cache belongs to
//     one sequence.
//   - The number of MoE layers, experts and shapes are validated at load time; Step validates tokens and capacity before
//     it computes, so that it either advances all caches or none.
package model
