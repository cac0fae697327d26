// SPDX-License-Identifier: Apache-2.0

// Package store is the server of the artifact store. It stores artifacts in a bucket and serves them over HTTPS.
// Package artifact defines the protocol and implements the client.
//
// Invariants:
//   - Each key of the bucket contains a complete artifact with verified bytes. On a directory an artifact is written to
//     a temporary file, flushed to disk and renamed. Temporary files of a killed store are removed at the next start.
//     On S3 an upload becomes visible when it is completed, and is aborted on any error. The parts of a killed store
//     stay invisible until the bucket's lifecycle rule for incomplete uploads removes them.
//   - Only one process writes to a directory, because it holds a lock. Several processes can write to S3.
//   - The store only needs the API server, to authenticate callers. It does not need the operator. It caches the review
//     of a token for at most a minute, so that a deleted or relabeled pod loses access within that time. The number of
//     reviews of unconfirmed tokens is limited per address.
//   - All state is in the bucket, except for the CA, which is in a Secret.
//
// # Authorization
//
// A caller authenticates with a service account token for the audience artifacts.semmoe.io. The API server must confirm
// the token for that audience (status.audiences). Tokens for the API server are rejected, and tokens for this store are
// invalid elsewhere. The manager is identified by its ServiceAccount and is allowed to do everything. All other tokens
// must be bound to a running pod, and the pod determines the permissions, see [Authorize]:
//
//	pod                                             permission
//	label semmoe.io/component: profile,             read and write the profile of that id
//	label semmoe.io/inputs: ID, controlled by a Job
//	annotation semmoe.io/plan-digest: DIGEST        read the plan with the first 16 characters of the digest as id
//	the same, and annotation                        read the plans
//	semmoe.io/follow-tables
//	label semmoe.io/component: router               read the plans
//
// All permissions are limited to the namespace of the pod. A request router can read all plans of its namespace,
// because it outlives the revisions that it serves. An engine pod that follows tables can, because later plans have new
// tables for its placement. Users who are allowed to create pods in a namespace can set these labels. The namespace is
// the security boundary, as for Secrets.
package store
