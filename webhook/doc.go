// SPDX-License-Identifier: Apache-2.0

// Package webhook implements admission webhooks for the operator's kinds. They reject errors that the schemas cannot
// detect, and return warnings for risky settings.
//
// Invariants:
//   - No object is changed: all defaults are in the schemas, so that a GitOps tool reads the objects that it applied.
//   - Nothing depends on the webhooks. The controllers repeat the checks and report errors in conditions. The failure
//     policy is Ignore, because an unavailable manager must not prevent changes of a MoEDeployment.
//   - An existing object can always be changed: changes of metadata, deletions, and errors that the stored object also has
//     are accepted.
//   - Content of another object causes a rejection only if it is immutable, and a warning elsewhere, because a GitOps tool
//     applies the objects of one commit in any order.
package webhook
