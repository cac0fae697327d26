// SPDX-License-Identifier: Apache-2.0

// Package breaker implements circuit breaking with outlier detection: a backend that fails requests gets none for an
// ejection time, and then a limited number until it serves one.
//
// A breaker is closed, open for the ejection time, and then half-open until a request is served:
//
//	unreachable   opens it for the ejection time
//	unavailable   (503) opens it, for twice as long after each further one
//	failed        (other 5xx) opens it after a number of consecutive ones, for twice as long after each further one
//	error rate    opens it if the share of all of these in a window is too high, for twice as long each further time
//
// Invariants:
//   - An ejection time is at most MaxEjection.
//   - Outcomes of requests that were sent before the end of an ejection do not extend it: they belong to its cause.
//   - The package reads no clock and holds no lock. The caller decides what happens if all backends are ejected.
package breaker
