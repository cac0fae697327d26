// SPDX-License-Identifier: Apache-2.0

// Package audit compares the requests in the audit log of an API server with the rights that roles grant. It finds
// rights that no request uses, and requests that were refused. It also lists the containers that a pod security
// standard would refuse.
//
// Invariants:
//   - A right counts as used only if a subject of its binding made the request, in the namespace of the right.
//   - Some rights are not requested separately: the API server checks them while it answers another request (see
//     Log.used). Another test must show that these rights are needed.
package audit
