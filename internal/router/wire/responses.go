// SPDX-License-Identifier: Apache-2.0

package wire

import "github.com/semmoe/operator/internal/router/jsonscan"

// ResponsesPath is the route of OpenAI's Responses API.
const ResponsesPath = "/v1/responses"

// PreviousResponse returns the id of the stored response that a request to ResponsesPath continues; empty if there is
// none.
func (b Body) PreviousResponse() string {
	id, _ := jsonscan.String(b.get("previous_response_id"))
	return id
}
