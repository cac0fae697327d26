// SPDX-License-Identifier: Apache-2.0

// Package inspection inspects a checkpoint, and optionally a data set, with Jobs that need no device. Controllers
// cannot read the volumes of users, and no device is used before both are valid.
//
// Invariants:
//   - The state of an inspection is derived from its Jobs and their pods. A Job stores its report in an annotation, so that
//     the report outlives the pod.
//   - A failed Job is kept until the next attempt ends, to record the number of attempts.
package inspection
