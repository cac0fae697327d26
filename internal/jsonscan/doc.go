// Package jsonscan finds the parts of a JSON text in one pass over it and without copying: a request router reads a few
// members of bodies of which encoding/json would decode all, several times over.
//
// Invariants:
//   - It accepts what encoding/json accepts as valid, and nothing else, and reads strings as encoding/json does: bytes that
//     are not UTF-8 become U+FFFD.
//   - Keys are compared as they are, as the engines do. (encoding/json takes "Prompt" for "prompt".)
//   - Its time is linear in the text, and its depth bounded.
package jsonscan
