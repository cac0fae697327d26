// SPDX-License-Identifier: Apache-2.0

// Package podtemplate merges a user's pod template over the operator's.
//
// Invariant: fields that the user omits stay unchanged; the inputs are not modified.
package podtemplate
