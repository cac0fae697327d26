// Package machines reads the hardware profiles that objects name: those that are built in, and users' own in ConfigMaps.
//
// Invariant: what Read returns has passed hardware.Profile.Check, and its digest is that of the very bytes it was read from.
package machines
