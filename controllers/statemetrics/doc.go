// SPDX-License-Identifier: Apache-2.0

// Package statemetrics exports the status of the operator's objects as metrics, for alerts. Prometheus reads the same
// conditions and replica counts as a user of kubectl.
//
// Invariants:
//   - Nothing is stored between scrapes, so that the series of an object end when the object is deleted.
//   - Only the leader exports the metrics, so that each series exists once.
package statemetrics
