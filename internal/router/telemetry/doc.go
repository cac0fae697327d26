// SPDX-License-Identifier: Apache-2.0

// Package telemetry records single requests: as OpenTelemetry spans, and in an access log.
//
// Invariants:
//   - Both are off by default. A router without them creates no record.
//   - A record contains no prompt, no answer and no key.
//   - Serving never waits for a collector or for the reader of the log. Spans and lines that do not fit into the queue are
//     dropped and counted.
package telemetry
