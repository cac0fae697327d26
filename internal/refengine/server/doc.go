// SPDX-License-Identifier: Apache-2.0

// Package server implements the part of SGLang's HTTP API that the operator uses: health, models, completions, chat
// completions, generate, tokenize, loads and metrics.
//
// Invariants:
//   - A request is validated completely before it is queued. A client error is a 4xx in OpenAI's format that names the
//     field and the allowed values. An unsupported parameter that would change the output is rejected. Unknown fields
//     are ignored, as in SGLang.
//   - Streaming and non-streaming responses contain the same text, which is the output of the scheduler.
//   - A request ends before the next step if its client disconnects.
package server
