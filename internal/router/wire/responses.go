package wire

import "strings"

// ResponsesPath is the route of OpenAI's Responses API.
const ResponsesPath = "/v1/responses"

// StoreMember is the member of a request to ResponsesPath that enables storage of the response.
const StoreMember = "store"

// IsStoredResponse reports whether a route is about a response that an engine has stored.
func IsStoredResponse(path string) bool { return strings.HasPrefix(path, ResponsesPath+"/") }

// NeedsStore returns the member of a request to ResponsesPath that requires stored responses, and advice for the
// client. It returns empty strings if there is none.
func (b Body) NeedsStore() (member, advice string) {
	given := func(name string) bool { value := b.get(name); return value != nil && string(value) != "null" }
	switch {
	case given("previous_response_id"):
		return "previous_response_id", "send the earlier items in input"
	case given("conversation"):
		return "conversation", "send the earlier items in input"
	case string(b.get("background")) == "true":
		return "background", "leave it out, and stream the response"
	case string(b.get("store")) == "true":
		return "store", "leave it out, or send false"
	}
	return "", ""
}

// WithoutStore returns a request to ResponsesPath in two parts, with storage disabled. SGLang stores a response by
// default, in the memory of its pod, and never drops it (srt/entrypoints/openai/serving_responses.py of 0.5.17).
func (b Body) WithoutStore() (head string, rest []byte) {
	if b.Has(StoreMember) {
		return "", b.data
	}
	return b.With(Addition{StoreMember, "false"})
}
