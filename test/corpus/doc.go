// SPDX-License-Identifier: Apache-2.0

// Package corpus provides text of many kinds for demonstrations and measurements: documents that were written for the
// corpus, in programming languages, data formats and human languages, and files of the Go distribution.
//
// Invariants:
//   - The same Go release and the same seed result in the same documents and requests on every machine.
//   - Each kind is split separately, by whole documents, so that the held-out part has the same kinds as the rest, and
//     shares no document with it.
package corpus
