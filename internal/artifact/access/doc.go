// Package access brings the artifact store's address, certificate authority and tokens to those who need them: the
// controllers, and the pods that they make.
//
// Invariant: nothing is cached that can go stale; a store that is installed later, or whose authority is renewed, is
// found at the next use.
package access
