// Package locality knows on which expert-parallel rank each expert has a copy, and so whether an activation is local to
// the rank that serves its token.
//
// Invariants: an accepted map places every expert of every MoE layer at least once, gives each rank the same number of
// slots, and puts no expert twice on one rank. Maps never change what is computed.
package locality
