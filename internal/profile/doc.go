// Package profile records which experts the tokens of a data set activate, by sending its requests to a running engine. The
// result is a routing trace of a sample of whole requests, and counts over all tokens; together with a manifest they are a
// profile in the artifact store.
//
// Invariants:
//   - What is recorded follows from the data set, the sampling and a seed: it depends neither on the order in which the
//     engine answers nor on how many requests are in flight.
//   - Memory is bounded: by the tokens of the trace, and by the different pairs of token and expert that are counted.
//   - A profile is named by its inputs (ID), and the manifest in a scope is that of the scope's inputs.
//   - Prompts are never logged.
package profile
