// Package engine is what the operator and the request router know about inference engines: which flags start one, which
// of them the operator sets itself, how requests are pinned to a rank, how a plan reaches it, and when that is of no use
// (docs/engines.md).
//
// Invariants:
//   - An Adapter is a value without state; everything it returns follows from its arguments.
//   - An expert map that Encode has written is whole: every expert of every layer has a slot, and none has two on a rank.
//     Engines do not check that, or fail on it without saying why.
package engine
