// SPDX-License-Identifier: Apache-2.0

// Package bundle distributes plans: complete plans through the artifact store, and the files that an engine reads
// through a ConfigMap.
//
// Invariants:
//   - The scope of a plan is its short digest. The result of the scope is bundle.json, which lists every file by digest and
//     is published after all files: a plan that can be found is complete.
//   - A directory of Fetch contains a complete plan, or does not exist.
//   - A Follower replaces a plan only by complete and verified tables for the same placement and model, in one step.
//   - A ConfigMap contains unchanged files of the plan, so that the manifest in it verifies them.
package bundle
