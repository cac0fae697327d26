// SPDX-License-Identifier: Apache-2.0

// Package access implements the client of the artifact store, and provides its address, CA certificate and tokens to
// controllers and pods.
//
// Invariant: no stale values are cached. A store that is installed later, or whose CA is renewed, is found at the next
// use.
package access
