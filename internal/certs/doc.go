// SPDX-License-Identifier: Apache-2.0

// Package certs implements a certificate authority (CA) with a key in a Secret. The replicas of a server share one
// CA, and so do the replicas of a client. No other software is required.
//
// Invariants:
//   - If several processes create or renew the CA at the same time, one process succeeds and the others use its CA.
//   - The key of a server or client never leaves its process.
//   - Bundle contains every CA certificate that may have signed a certificate in use.
package certs
