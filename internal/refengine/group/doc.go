// Package group holds the processes of one replica together that is spread over several nodes, as a real engine's collectives do:
// none serves before all are there, and none outlives the others.
//
// Invariants:
//   - Each member is another node of the group: two with one number are refused, as is one that was made for another size.
//   - A member that is lost ends the group for all others. A group that ends because its leader has drained is no error.
//   - A member that is told to stop asks its leader to drain, and waits for that. One that a leader has taken for another's, left over from
//     the group before, would else keep its own successor out for as long as it may take to stop.
package group
