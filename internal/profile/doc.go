// Package profile records which experts the tokens of a data set activate, by sending its requests to a running engine,
// and returns them as a routing trace.
//
// Invariants: the requests are chosen by a seed, and the trace does not depend on the order in which the engine answers
// or on how many requests are in flight. Memory is bounded by the number of tokens asked for. Prompts are never logged.
package profile
