// Package plans has the plans that engine pods serve under, as a router uses them: it brings them, keeps them, and says what each
// tells of a request.
//
// Invariants:
//   - A Layout is immutable. New tables make another one, for the same placement and no other.
//   - The Keeper gives the pool only plans that are whole and verified, and keeps them on disk: a router that starts without the
//     artifact store has those that pods named before. What nobody names goes after a while.
//   - What is scored of a prompt is bounded, and taken from all of it.
//   - A plan that cannot be had costs locality, never an answer.
package plans
