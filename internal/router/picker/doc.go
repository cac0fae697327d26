// Package picker is the server of the endpoint picker protocol 1.0, by which a gateway asks where a request shall go: the
// external processor (ext_proc) of the Gateway API's inference extension. It knows the protocol, and nothing of how
// endpoints are chosen: that is its Picker's.
//
// Invariants:
//   - What a stream has taken of the Picker is released when the stream ends, however it ends.
//   - A request's body is bounded. Nothing of a request is sent on before all of it is known and an endpoint was picked.
//   - A response passes through chunk by chunk as it arrives. Only what the Picker reads ahead of is held back.
//   - Headers, body and trailers are answered in this order, and each in the way that the gateway's body mode allows.
//   - The header and the dynamic metadata of a pick are the same.
package picker
