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
