// Package hardware models the kernels and exchanges of a MoE layer on given machines: each takes a start-up time and time for its work, fitted to
// measurements. A profile is the set of these models, with how well each one fits, as a file.
//
// Invariants:
//   - Every time is convex in the work, or the shorter of two such (Exchange.Lines), does not fall with it, and is not negative without any: schedules
//     are searched by that.
//   - A fit is a function of the measurements.
//   - A held-out error is of measurements that the model has not seen.
package hardware
