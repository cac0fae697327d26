// SPDX-License-Identifier: Apache-2.0

package wire

import "bytes"

// IsQueueFull reports whether an engine rejects a request because its queue is full. Engines report a full queue with
// the status of a loading or draining engine. Only the text differs: SGLang's is "The request queue is full."
func IsQueueFull(refusal []byte) bool {
	return bytes.Contains(bytes.ToLower(refusal), []byte("queue is full"))
}

// IsNotFoundResponse reports whether a response is the answer of an engine's web framework for an unknown route:
// FastAPI's {"detail":"Not Found"}, or the same words as an error message. The answer for an unknown model has a
// different text.
func IsNotFoundResponse(answer []byte) bool {
	b := ParseBody(answer)
	for _, text := range [][]byte{b.get("detail"), b.get("message"), ParseBody(b.get("error")).get("message")} {
		if string(text) == `"Not Found"` {
			return true
		}
	}
	return false
}
