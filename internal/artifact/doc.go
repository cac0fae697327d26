// Package artifact is the contract of the artifact store and its client. An artifact is a file that is too large or too
// private for a ConfigMap: a routing trace with its counts, or the forecast tables of a plan. The package store is the
// other end.
//
// Invariants:
//   - An artifact is named by the sha256 of its bytes. Both ends compute it from the bytes that pass: other bytes than
//     the name says are never stored, and never read to their end without an error.
//   - An artifact exists whole or not at all. What a client that dies has sent so far is removed.
//   - An artifact lives in a scope: the profile or the plan of one namespace that it belongs to. Who may read or write
//     is decided by scope alone; see the package store.
//   - A scope has at most one result, an artifact of that scope. The first one published wins and never changes: it
//     names the profile or plan that counts, however often its Job ran and whatever else was lost. It lives as long as
//     its artifact, and goes when another one of its scope is found damaged.
//   - Nothing is deleted but by Delete and Sweep, which the manager alone may call, and what the store finds damaged when it is
//     read.
//
// # Protocol
//
// HTTPS with a bearer token whose audience is [Audience]. Below /v1/namespaces/{namespace}/{kind}/{id}, where kind is
// profiles or plans:
//
//	PUT    /artifacts/{digest}    store the body, whose length must be declared; replaces equal bytes
//	GET    /artifacts/{digest}    the bytes, which the client must verify
//	HEAD   /artifacts/{digest}    whether it exists
//	DELETE /artifacts/{digest}?modified=T   unless it was stored again after T (RFC 3339)
//	GET    /artifacts             the artifacts of the scope
//	PUT    /result                {"digest": …}; the answer is the digest that won
//	GET    /result                {"digest": …}
//
// and GET /v1/artifacts lists every scope. An error is {"error": "what is wrong"} with status 400 (malformed name), 401
// (token), 403 (not this pod's), 404, 408 (the body stalled, or was slow: try again), 409 (in use), 411 (no length), 413 (too large), 422 (the bytes
// are not those of the digest), 429 (too many new tokens, or uploads: try again), 503 (try again) or 507 (the store is full).
package artifact
