// SPDX-License-Identifier: Apache-2.0

// Package lab compares placement algorithms, forecasts and serving methods on routing traces, and describes traces. Only
// semmoe-lab and tests use it: a plan that serves requests needs none of it. It imports the solver, which must not
// import it.
//
// Start reading at Compare, Describe and SolveServing.
//
// Invariants:
//   - All methods are solved on the same train requests and scored on the same test requests.
//   - Results are the same on every machine, for every number of processors, except measured times.
package lab
