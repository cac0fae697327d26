package wire

import (
	"bytes"
	"io"
)

// refusalBytes is how much of a refusal is read to learn its reason.
const refusalBytes = 4 << 10

// SaysFull tells that an engine refuses a request because too many wait. Engines say that with the status of one that loads or
// drains, and in words: SGLang's are "The request queue is full."
func SaysFull(refusal io.Reader) bool {
	text, _ := io.ReadAll(io.LimitReader(refusal, refusalBytes)) // what has come says enough
	return bytes.Contains(bytes.ToLower(text), []byte("queue is full"))
}

// SaysNotFound reports whether an answer is the one that the web frameworks of engines give for a route that they do not have: FastAPI's
// {"detail":"Not Found"}, or the same words as the message of an error. For a model that an engine does not have it has other words.
func SaysNotFound(answer []byte) bool {
	b := ParseBody(answer)
	for _, text := range [][]byte{b.get("detail"), b.get("message"), ParseBody(b.get("error")).get("message")} {
		if string(text) == `"Not Found"` {
			return true
		}
	}
	return false
}
