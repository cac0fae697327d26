// SPDX-License-Identifier: Apache-2.0

// Package jsonscan finds the members and elements of a JSON text in one pass and without copying. The request router
// reads only a few members of each body, and encoding/json would decode the whole body several times.
//
// Invariants:
//   - It accepts exactly the texts that encoding/json accepts as valid, and decodes strings in the same way: bytes that
//     are not valid UTF-8 become U+FFFD.
//   - Keys are compared case-sensitively, as engines do. (encoding/json accepts "Prompt" for "prompt".)
//   - Its time is linear in the length of the text, and its depth is bounded.
package jsonscan
