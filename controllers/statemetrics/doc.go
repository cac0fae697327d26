// Package statemetrics tells the status of the operator's objects as metrics, for alerts: what a person reads with kubectl, and what
// Prometheus sees, is the same.
//
// Invariants: nothing is stored, so that series end with their object; the leader alone has them, so that each exists once.
package statemetrics
