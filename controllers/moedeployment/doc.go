// Package moedeployment brings the model of a MoEDeployment into service and keeps it there: it inspects the checkpoint,
// writes one workload per revision, moves replicas from revision to revision, and has the request router and the
// Services made that stand in front (package front), and judged whether traffic has left the plan (package locality).
//
// Invariants:
//   - Every decision is derived from observed objects. Status is a report; wiping it changes nothing.
//   - A revision's workload is named by the hash of its inputs and its template is written once: neither a change of the
//     spec nor an upgrade of the operator touches the template of a workload that exists. Only replicas change.
//   - Children are written by server-side apply with the field manager semmoe-moedeployment, and only where they differ.
//   - The cores are pure: what a revision's workload is (package revisions), how replicas move (internal/rollout), whether traffic has
//     left the plan (package locality), and the conditions (observation to status).
//
// Size: one controller, all of whose steps decide from the same observation and the same children; to part them would export both types
// with all they hold, for nobody else.
package moedeployment
