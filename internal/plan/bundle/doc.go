// Package bundle carries a plan to those who use it: all of it through the artifact store, and the part that an engine
// reads through a ConfigMap.
//
// Invariants:
//   - A plan lies in the scope of its short digest. The scope's result is bundle.json, which lists every file by digest
//     and is published after all of them: a plan that can be found is whole.
//   - A directory that Fetch has made holds a whole plan, or does not exist.
//   - What a ConfigMap holds are bytes of the plan's files, so that the manifest in it vouches for them.
package bundle
