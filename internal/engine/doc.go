// SPDX-License-Identifier: Apache-2.0

// Package engine describes the inference engines for the operator and the request router: the command line of each
// engine, the flags that the operator sets, how requests are pinned to a rank, how a plan is passed to the engine, and
// when a plan has no benefit (docs/engines.md).
//
// Invariants:
//   - An Adapter is a stateless value. Its results depend only on its arguments.
//   - An expert map written by Encode is complete: every expert of every layer has a slot, and no expert has two slots
//     on a rank. Engines do not check this, or fail without a clear error.
package engine
