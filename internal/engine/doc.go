// Package engine is what the operator and the request router know about inference engines: which flags start one, which
// of them the operator sets itself, how requests are pinned to a rank.
//
// Invariant: an Adapter is a value without state; everything it returns follows from its arguments.
package engine
