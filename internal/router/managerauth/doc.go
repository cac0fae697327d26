// SPDX-License-Identifier: Apache-2.0

// Package managerauth authenticates managers to request routers with client certificates.
//
// The managers share a certificate authority in a Secret in the namespace of the managers. A router has only the
// certificates of that authority. It needs no Secret, no token, and no answer of the API server.
//
// Invariants:
//   - The private keys of the authority and of a manager's certificate stay with the managers.
//   - A manager does not verify the certificate of a router, which is self-signed. The manager sends no secret, and TLS binds
//     the proof of its key to the connection. An interceptor can therefore answer a manager, but cannot read from a router.
package managerauth
