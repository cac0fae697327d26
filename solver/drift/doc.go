// SPDX-License-Identifier: Apache-2.0

// Package drift detects from sampled requests whether traffic has moved away from the traffic that a plan was made for.
//
// The package keeps three one-sided CUSUM charts (Page 1954). Each chart has a reference value k and a decision
// interval h: the chart adds the evidence of a sample beyond k, never falls below zero, and raises an alarm above h.
//
//   - The residual chart sums the expected local share of a request minus the observed share. The expectation depends
//     on the forecast of the request and on its ranks. With attention data parallelism, the local share varies between
//     requests by a third of its mean, and with the load balance of the ranks. Without the forecast as control variate,
//     detecting a drop of 10% takes several times as many requests. With attention tensor parallelism, differences
//     between kinds of requests cause most of the variance of long runs. The shares of known tokens and pairs explain
//     half of that variance, and the token ids (Text) explain most of the rest.
//   - The level chart uses the local share that a request would have had on its best rank. It detects requests for
//     which the plan expects a low share, which the residual chart cannot see.
//   - The novelty chart uses the share of tokens that the plan has never seen.
//
// Invariants:
//   - The statistic depends only on the samples and their order, so it can be recomputed from recorded samples.
//   - A calibration is valid for one plan and its tables. Its decision intervals come from simulated traffic of
//     held-out requests, dispatched as the request router does, in random order and in runs of one kind. A run of
//     baseline requests of one kind is not drift.
//   - A sample with NaN or infinite values is no evidence and leaves the charts unchanged.
//   - A calibration depends only on requests and options, not on the number of processors.
package drift
