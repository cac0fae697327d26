// SPDX-License-Identifier: Apache-2.0

// Package schedule computes the schedule of a plan inside MoE layers. For attention and experts on separate ranks, it
// is FinDEP's schedule by the length of samples (package pipeline). For experts on the ranks of attention, it is the
// number of groups in which EPS-MoE processes them, by the tokens of a rank (package eps).
//
// All times are modelled from one hardware profile. No engine uses the schedule: it is for users, and for plug-ins that
// read plans.
//
// Invariants:
//   - A schedule is a deterministic function of the model's shape, the ranks, the local activation rate and the
//     profile.
//   - The result of Of passes Check.
//   - Of takes at most a few milliseconds for each length.
package schedule
