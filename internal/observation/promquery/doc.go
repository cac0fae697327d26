// SPDX-License-Identifier: Apache-2.0

// Package promquery queries a Prometheus server, or a server with the same HTTP API, for the values of one series over
// a time range.
//
// Invariants:
//   - Only allowed servers are contacted: listed hosts, and Services in the namespace of the object that refers to the
//     server. The resolved address is checked when the connection is made. Link-local and metadata addresses are never
//     contacted, and redirects are not followed.
//   - The size and the time of a response are limited.
//   - Every error is an *Error with one of a few reasons and a constant message. Neither discloses whether an address
//     is open, nor the status or the text of a response. The cause is for logs only.
//   - A server that did not respond is not queried again for some time, because many objects may refer to the server,
//     and each query would wait for the timeout.
package promquery
