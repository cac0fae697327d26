// SPDX-License-Identifier: Apache-2.0

// Package moedeployment brings the model of a MoEDeployment into service and keeps it there: it inspects the
// checkpoint, creates one workload per revision, moves replicas between revisions, and reports the status. Its parts
// are packages. Decisions: decision (from one snapshot), planner (the plan to serve under), locality (traffic compared to
// the plan), revisions (workloads), desired (shared helpers). Reads and writes: plans, traffic, childobjects, and front
// (objects in front of the engines). Start at Reconciler.Reconcile, decision.Decide and decision.DecideRollout.
//
// Invariants:
//   - Every decision is based on observed objects. Status is write-only: clearing it changes no decision.
//   - A revision's workload is named by the hash of its inputs, and its template is written once. Neither a change of
//     the spec nor an upgrade of the operator changes the template of an existing workload. Only the replica count
//     changes.
//   - Children are written by server-side apply with the field manager semmoe-moedeployment, and only if they differ.
//   - The cores are pure: rendering a workload (package revisions), moving replicas (internal/rollout), evaluating
//     traffic (package locality), and the conditions (from observation to status).
package moedeployment
