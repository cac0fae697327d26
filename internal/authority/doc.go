// Package authority is a certificate authority that lives in a Secret: servers of the operator that are several, or outlive a
// pod, share one and need nothing installed beside them.
//
// Invariants: of processes that start together, or renew together, one makes the authority and the others take it. A server's key
// never leaves its process. Bundle holds every certificate that may still have signed one in use.
package authority
