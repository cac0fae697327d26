// SPDX-License-Identifier: Apache-2.0

// Package cost scores plans; no other package does. It takes a placement, a forecast and a routing trace, runs the
// scheduler, and counts the recorded activations, independently of the scheduler's objective.
//
// Invariants:
//   - Forecasts and schedulers never see the routes by which they are scored.
//   - Overall figures weigh MoE layers equally. With attention data parallelism they are means over the arrival
//     orders.
//   - lar ≤ oracle_lar ≤ upper_bound, always.
//   - An activation of an expert with several copies is computed by the copy on the token's rank, else by a copy on
//     its node, else by the copies round-robin.
package cost
