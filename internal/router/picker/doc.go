// SPDX-License-Identifier: Apache-2.0

// Package picker implements the server of the endpoint picker protocol 1.0, with which a gateway asks for the endpoint
// of a request: the external processor (ext_proc) of the Gateway API's inference extension. It implements only the
// protocol. A Picker chooses the endpoints.
//
// Invariants:
//   - Everything that a stream has reserved from the Picker is released when the stream ends.
//   - The size of a request body is bounded. No part of a request is forwarded before it is complete and an endpoint was picked.
//   - A response is forwarded chunk by chunk as it arrives. Only data that the Picker reads ahead is delayed.
//   - Headers, body and trailers are answered in this order, in the form that the body mode of the gateway allows.
//   - The header and the dynamic metadata of a pick contain the same endpoints.
package picker
