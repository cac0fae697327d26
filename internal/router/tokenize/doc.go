// SPDX-License-Identifier: Apache-2.0

// Package tokenize asks engines for the token ids of prompts that the request router cannot tokenize itself.
//
// Invariants:
//   - A request waits at most 50 ms for a response. Engines that do not respond are not asked for 1 s.
//   - Responses are not stored.
package tokenize
