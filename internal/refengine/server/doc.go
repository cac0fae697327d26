// Package server speaks the part of SGLang's HTTP surface that the operator uses: health, models, completions, chat
// completions, generate, tokenize, loads and metrics.
//
// Invariants:
//   - A request is validated completely before it is queued; a fault of the client is a 4xx in OpenAI's error shape that
//     names the field and what is allowed. A parameter that would change the output and is not supported is refused,
//     never ignored; fields that nobody knows are ignored, as SGLang does.
//   - Streaming and not streaming give the same text, and both are what the scheduler gave.
//   - A request whose client leaves ends before the next step.
package server
