// Package tokenize asks engines for the token ids of prompts that the request router cannot tokenize itself.
//
// Invariants:
//   - A request waits for an answer for a moment at most, and engines that do not answer are left alone for a while.
//   - What is told is kept nowhere.
package tokenize
