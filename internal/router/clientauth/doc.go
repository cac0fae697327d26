// SPDX-License-Identifier: Apache-2.0

// Package clientauth authenticates clients of the request router by API keys.
//
// Invariants:
//   - Keys are kept as SHA-256 hashes only, and appear in no log, metric, error or request to an engine.
//   - A comparison takes the same time for every key, and compares all keys.
//   - A client is known by the name of its key, which is the name of the file: a key of a Secret.
//   - An invalid directory is an error at the start. Later, the last valid keys stay in use.
package clientauth
