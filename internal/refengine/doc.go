// SPDX-License-Identifier: Apache-2.0

// Package refengine implements the reference engine: an MoE inference engine for CPUs with the part of SGLang's HTTP
// API that the operator uses. It allows profiling, plans, routing and drift to run without a GPU.
//
// Invariants:
//   - Ranks are logical. Ranks, expert maps and batches determine which activations count as local. They do not change
//     outputs, except with an injected fault (Options.Fault).
//   - The HTTP server responds before the model is loaded, and until the last request is done. /health reports the
//     state.
//   - Options are validated before any work. The error for contradicting options names both of them.
package refengine
