// Package cost scores plans. It is the only place that does: it takes a placement, a forecast and a routing trace, lets
// the scheduler decide, and counts what really happens, independently of how the solver valued anything.
//
// Invariants:
//   - Forecasts and schedulers never see the routes by which they are judged.
//   - Overall figures weigh MoE layers equally. Attention data parallelism reports means over the arrival orders.
//   - lar ≤ oracle_lar ≤ upper_bound, always.
//   - An activation of an expert with several copies is served by the copy on the token's rank, else by one on its node,
//     else by the copies in turn.
package cost
