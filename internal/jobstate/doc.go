// Package jobstate reads how attempts of one piece of work went from the Jobs that made them, and says which failures are final.
//
// Invariant: attempts are counted by the Jobs that exist, and numbered at the end of their names; there is no other memory.
package jobstate
