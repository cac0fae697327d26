// SPDX-License-Identifier: Apache-2.0

// Package artifact defines the protocol of the artifact store, and the environment of pods that use it. An artifact is a
// file that is too large or too private for a ConfigMap: a routing trace with its counts, or the forecast tables of a
// plan. Package access implements the client, and package store the server.
//
// Invariants:
//   - The name of an artifact is the SHA-256 digest of its bytes. Client and server compute the digest while they
//     transfer the bytes. Bytes that do not match the digest are never stored, and reading them ends with an error.
//   - An artifact is complete or does not exist. An interrupted upload is removed.
//   - An artifact belongs to a scope: one profile or plan of a namespace. Access is decided only by scope; see package
//     store.
//   - A scope has at most one result, which is one of its artifacts. The first published result is final, even if the
//     Job of the profile or plan runs several times. The result is deleted with its artifact, and if another artifact
//     of the scope is found to be damaged.
//   - Artifacts are deleted only by Delete and Sweep, which only the manager is allowed to call, and by the store if it
//     finds damaged bytes while reading.
//
// # Protocol
//
// HTTPS with a bearer token for the audience [Audience]. The following paths are below
// /v1/namespaces/{namespace}/{kind}/{id}, where kind is profiles or plans:
//
//	PUT    /artifacts/{digest}    store the body (Content-Length is required); replaces equal bytes
//	GET    /artifacts/{digest}    the bytes, which the client must verify
//	HEAD   /artifacts/{digest}    whether it exists
//	DELETE /artifacts/{digest}?modified=T   unless it was stored again after T (RFC 3339)
//	GET    /artifacts             the artifacts of the scope
//	PUT    /result                {"digest": …}; the response is the digest of the scope's result
//	GET    /result                {"digest": …}
//
// GET /v1/artifacts lists the artifacts of all scopes. An error is {"error": "message"} with status 400 (malformed
// name), 401 (invalid token), 403 (not allowed for this pod), 404, 408 (the transfer stalled or was too slow: retry),
// 409 (in use), 411 (no length), 413 (too large), 422 (the bytes do not match the digest), 429 (too many new tokens or
// uploads: retry), 503 (retry) or 507 (the store is full).
package artifact
