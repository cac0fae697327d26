// SPDX-License-Identifier: Apache-2.0

// Package profile records which experts the tokens of a data set activate, by sending its requests to a running engine.
// The result is a routing trace of a sample of complete requests, and counts over all tokens. Together with a manifest
// they are a profile in the artifact store.
//
// Invariants:
//   - The result depends on the data set, the sampling and a seed. It depends neither on the order in which the engine
//     responds nor on the number of concurrent requests.
//   - Memory is bounded by the tokens of the trace, and by the number of different pairs of token and expert.
//   - The ID of a profile is a hash of its inputs, and the manifest in a scope has the inputs of the scope.
//   - Prompts are never logged.
package profile
