// Package wire reads and edits what is on its way between clients and engines: the bodies of requests, and responses, whole or as
// streams of server-sent events.
//
// Invariants:
//   - What cannot be read as expected counts as absent. It is the engine's to refuse, and reaches it byte for byte.
//   - An edit leaves every byte alone that it is not about: the order of members, white space, the way numbers are written.
//   - What is read of a prompt is bounded (ReadTokens), what a request can claim to generate is too.
//   - Each event of a stream is passed on as soon as it has arrived.
package wire
