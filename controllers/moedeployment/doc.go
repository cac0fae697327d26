// Package moedeployment brings the model of a MoEDeployment into service and keeps it there: it inspects the checkpoint,
// creates one workload per revision, moves replicas from revision to revision, and reports. Its parts are packages of their own, each
// importing those after it: planner (which plan is served under), front (what stands before the engines), locality (whether traffic has
// left the plan), revisions (what a workload is) and desired (what they have in common).
//
// Invariants:
//   - Every decision is derived from observed objects. Status is a report; wiping it changes nothing.
//   - A revision's workload is named by the hash of its inputs and its template is written once: neither a change of the
//     spec nor an upgrade of the operator touches the template of a workload that exists. Only replicas change.
//   - Children are written by server-side apply with the field manager semmoe-moedeployment, and only where they differ.
//   - The cores are pure: what a revision's workload is (package revisions), how replicas move (internal/rollout), whether traffic has
//     left the plan (package locality), and the conditions (observation to status).
package moedeployment
