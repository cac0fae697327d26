// Package audit compares what an API server was asked for, as its audit log tells, with what roles grant: rights that nothing uses,
// and requests that were refused. It also tells which containers a pod security standard would refuse.
//
// Invariants: a right counts as used by requests of its own subjects alone, where the right holds. Some rights are never asked for by
// a request of their own, but looked up while another is answered (see Log.used); for these another test has to show that they are
// needed.
package audit
