// Package store is the server of the artifact store: artifacts in a bucket behind HTTPS. The package artifact describes
// the protocol and has the client.
//
// Invariants:
//   - A key of the bucket holds a whole artifact whose bytes were verified, or is absent. On a directory an artifact is
//     written under a temporary name, flushed to the disk, then renamed; what a killed store left under temporary names
//     is removed when the next one starts. On S3 an upload becomes visible when it is completed, and is aborted on any
//     error; the parts of a store that was killed stay invisible until the bucket's lifecycle rule for incomplete
//     uploads removes them.
//   - One process writes to a directory: it holds a lock. On S3 several may.
//   - The store needs the API server to know its callers, and nothing else; not the operator. It keeps what it learned
//     about a token for at most a minute, so that a pod that is gone or relabelled loses its access within that time. Tokens
//     that were never confirmed cost each address a bounded number of questions.
//   - All state is in the bucket, but for the certificate authority, which is in a Secret.
//
// # Who may do what
//
// A caller shows a service-account token for the audience artifacts.semmoe.io. The API server must confirm it for that
// audience by name (status.audiences): a token for the API server itself is refused, and one for this store is of no use
// elsewhere. The manager is known by its ServiceAccount and may do everything. Any other token must be bound to a pod
// that still runs, and the pod decides, see [Authorize]:
//
//	pod                                             may
//	label semmoe.io/component: profile,             read and write the profile of that id
//	label semmoe.io/inputs: ID, controlled by a Job
//	annotation semmoe.io/plan-digest: DIGEST        read the plan whose id is the digest's first 16 characters
//	label semmoe.io/component: router               read the plans
//
// each in the pod's own namespace only. A request router reads all plans of its namespace because it outlives the
// revisions that it serves. Labels can be set by whoever may create pods in a namespace: as with its Secrets, the
// namespace is the boundary.
package store
