// SPDX-License-Identifier: Apache-2.0

// Package hub downloads a checkpoint from a server with the HTTP API of the Hugging Face hub into a directory.
//
// Invariants:
//   - The output directory appears in one rename, when all files are complete, verified and on disk. Its manifest names
//     repository, revision, commit and digests. An existing directory is never changed.
//   - A run with the same repository and revision finds the directory by its manifest, and sends no request.
//   - Runs with the same output directory exclude each other by a file lock, also on other nodes if the volume supports
//     locks. A run after a kill or a failure resumes.
//   - The token is sent only to the origin (scheme, host, port) of the endpoint, never to the target of a redirect.
//   - Everything that the server returns is bounded in size, count and time, and every path stays below the output
//     directory.
package hub
