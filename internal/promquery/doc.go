// Package promquery asks a Prometheus server, or one that speaks its HTTP API, for the values of one series over a time.
//
// Invariants:
//   - Only allowed servers are contacted: listed hosts, and Services of the namespace of the object that names the server. What a name
//     resolves to is checked at the connection. Link-local and metadata addresses are never contacted, and redirections are not followed.
//   - An answer is bounded in size and time.
//   - An error is an *Error: one of a few reasons and a constant message. Neither shows whether an address is closed, open, or which status or text it
//     answers. The cause is for logs.
//   - A server that does not answer is not asked again for a while, whoever asks: many objects may name it, and each would wait.
package promquery
