// Package drift tells from sampled requests whether traffic has moved away from a plan.
//
// It keeps three one-sided CUSUM charts (Page 1954). The first is on residuals: what a request's local share was, less what is
// expected of a request of its forecast on its ranks. In attention data parallelism the share varies from request to request by a
// third of its mean, and with the balance of the ranks: without the forecast as control variate a drop of a tenth takes several
// times as many requests to find. In attention tensor parallelism what kinds of requests differ in is most of the variance of long runs,
// and the shares of known tokens and pairs explain half of it; what its tokens are (Text) explains most of the rest.
// Residuals do not see requests of which the plan expects little to begin with. That is left to the other two: the
// shares themselves, as they would have been on the best ranks, and the tokens that the plan has never seen.
//
// Invariants:
//   - The statistic is a function of the samples in their order: whoever has the samples can compute it again.
//   - A calibration holds for one plan and its tables. Its thresholds come from simulated traffic of held-out requests, dispatched
//     as the request router does, in random order and in runs of one kind: a run of usual requests of one kind is no drift.
//   - A sample that is no number is no evidence: it changes nothing.
//   - A calibration is a function of requests and options, whatever the number of processors.
package drift
