// SPDX-License-Identifier: Apache-2.0

// Package exchange sends the requests of the router to engines over persistent HTTP/1.1 connections. http.Transport
// passes each request and response through two goroutines per connection and copies the body through small buffers,
// which takes more processor time than the rest of the router. A Transport writes the request and reads the response in
// the goroutine of the caller, and sends the header and a body in memory with one system call. Parsing of responses is
// that of net/http.
//
// Invariants:
//   - A request is sent on a connection only after the previous response on it was read to its end and nothing followed
//     it.
//   - A request is sent a second time only if a reused connection ended before the first byte of the response.
//   - The end of the context of a request ends its connection.
//   - The size of response headers and the number of interim responses are bounded.
//   - Requests that are not plain HTTP with a body of known length go through another http.RoundTripper.
package exchange
