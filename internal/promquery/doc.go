// Package promquery asks a Prometheus server, or one that speaks its HTTP API, for the values of one series over a time.
//
// Invariants:
//   - Nothing that the server sends is believed beyond its size and shape: the answer is bounded, redirections are not followed, and
//     an address that is not Prometheus' has nothing of its answer repeated.
//   - An error is an *Error: a reason and a text that stay the same while the fault does, so that they can stand in a condition.
//   - A server that does not answer is not asked again for a while, whoever asks: many objects may name it, and each would wait.
package promquery
