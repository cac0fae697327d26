// Package authority is a certificate authority whose key is stored in a Secret. The replicas of a server share one authority, and so do
// the replicas of a client. No other software has to be installed.
//
// Invariants: of processes that start together, or renew together, one makes the authority and the others take it. A server's or client's key
// never leaves its process. Bundle holds every certificate that may still have signed one in use.
package authority
