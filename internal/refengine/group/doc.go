// SPDX-License-Identifier: Apache-2.0

// Package group connects the processes of one replica that spans several nodes. Like the collectives of a real engine,
// it ensures that no process serves before all have joined, and that all processes stop together.
//
// Invariants:
//   - Each member has a different node number. A second member with the same number, or with a different group size, is
//     rejected.
//   - If a member is lost, the group ends for all others. The end of a drained group is no error.
//   - To stop, a member asks its leader to drain and waits for it. Without this, a remaining member of an earlier group
//     that joined this leader would block its successor until it stops.
package group
