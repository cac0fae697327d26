// Package inspection looks at a checkpoint, and at a data set where one is given, by CPU-only Jobs: controllers cannot read
// the volumes of users, and no device is spent before both are known to be sound.
//
// Invariants:
//   - The state of an inspection is read from its Jobs and their pods; a Job keeps its report as an annotation, so that it
//     outlives the pod.
//   - A failed Job is kept until the next attempt has ended, as the memory of how often it was tried.
package inspection
