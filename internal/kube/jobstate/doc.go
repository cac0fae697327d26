// SPDX-License-Identifier: Apache-2.0

// Package jobstate reads the results of attempts from their Jobs, and determines which failures are final.
//
// Invariant: attempts are counted by the existing Jobs, and numbered at the end of their names; there is no other
// memory.
package jobstate
