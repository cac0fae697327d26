// Package overlay merges a user's pod template over one of the operator's.
//
// Invariant: what the user leaves out stays as it is; neither input is changed.
package overlay
