// SPDX-License-Identifier: Apache-2.0

// Package calibration measures exchange and compute times on the user's GPUs, which the cost models of an MoE layer are
// fitted to. It embeds a script that only needs the PyTorch of an inference engine, runs the script on this machine or
// in a Job, follows its progress and reads its result.
//
// Invariant: a result is returned complete and exactly as the script wrote it, or not at all.
package calibration
