// Package access provides the artifact store's address, CA certificate and tokens to controllers, and to the pods that
// they create.
//
// Invariant: no stale values are cached. A store that is installed later, or whose CA is renewed, is found at the next
// use.
package access
