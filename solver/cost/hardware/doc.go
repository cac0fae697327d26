// SPDX-License-Identifier: Apache-2.0

// Package hardware models the kernels and exchanges of a MoE layer on given machines. Each model has a start-up time
// and a time for its work, fitted to measurements. A profile is the set of these models with their fit errors, as a
// file.
//
// Invariants:
//   - Every time is convex in the work, or the minimum of two such times (Exchange.Lines), is non-decreasing, and is
//     non-negative without work. The search for schedules depends on this.
//   - A fit is a deterministic function of the measurements.
//   - A held-out error is computed on measurements that were not used in the fit.
package hardware
