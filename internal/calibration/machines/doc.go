// SPDX-License-Identifier: Apache-2.0

// Package machines resolves references to hardware profiles: built-in profiles, and user-provided profiles in
// ConfigMaps.
//
// Invariant: a profile that Resolve returns has passed hardware.Profile.Check, and its digest is the digest of the bytes
// that it was parsed from.
package machines
