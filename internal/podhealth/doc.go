// Package podhealth tells what keeps pods from running, in words that name what to change.
//
// Invariants: a verdict is derived from the pods and the events given, and from nothing else; its message stays the same
// while the problem does, so that a condition that holds it is not written again and again.
package podhealth
