// SPDX-License-Identifier: Apache-2.0

// Package wire parses and edits the traffic between clients and engines: request bodies and responses, complete or as
// streams of server-sent events.
//
// Invariants:
//   - A value of an unexpected type counts as absent. It is forwarded byte for byte, and the engine validates it.
//   - An edit changes only the bytes that it concerns. The order of members, white space and number formats stay.
//   - The part of a prompt that is read is bounded (ReadTokens), and so is the output that a request can claim.
//   - Each event of a stream is forwarded as soon as it has arrived.
package wire
