// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// A message and a response equal the chat completion of the same conversation, streamed and not.
func TestMessagesAndResponsesEqualChat(t *testing.T) {
	e := start(t, fourRanks)
	for i, content := range []string{"func main() {", "der Hund und die Katze", "SELECT name"} {
		quoted, err := json.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		var chat struct {
			Choices []struct{ Message struct{ Content string } }
			Usage   struct {
				PromptTokens     int `json:"prompt_tokens"`
				CompletionTokens int `json:"completion_tokens"`
			}
		}
		e.post(t, "/v1/chat/completions", fmt.Sprintf(`{"messages":[{"role":"system","content":"s"},{"role":"user","content":%s}],"max_tokens":9}`, quoted)).into(t, &chat)
		want := chat.Choices[0].Message.Content
		var message struct {
			ID, Type, Role, Model string
			Content               []struct{ Type, Text string }
			StopReason            string `json:"stop_reason"`
			Usage                 struct {
				InputTokens  int `json:"input_tokens"`
				OutputTokens int `json:"output_tokens"`
			}
		}
		body := fmt.Sprintf(`{"model":"tiny","system":"s","messages":[{"role":"user","content":[{"type":"text","text":%s}]}],"max_tokens":9,"stream":%t}`, quoted, false)
		e.post(t, "/v1/messages", body).into(t, &message)
		if len(message.Content) != 1 || message.Content[0].Text != want || message.Content[0].Type != "text" || message.Type != "message" || message.Role != "assistant" || message.StopReason != "max_tokens" ||
			!strings.HasPrefix(message.ID, "msg_") || message.Usage.InputTokens != chat.Usage.PromptTokens || message.Usage.OutputTokens != chat.Usage.CompletionTokens {
			t.Errorf("%d: message %+v, want %q and the usage %+v", i, message, want, chat.Usage)
		}
		var counted struct {
			InputTokens int `json:"input_tokens"`
		}
		e.post(t, "/v1/messages/count_tokens", body).into(t, &counted)
		if counted.InputTokens != chat.Usage.PromptTokens {
			t.Errorf("%d: %d tokens are counted, want %d", i, counted.InputTokens, chat.Usage.PromptTokens)
		}
		names, deltas := namedEvents(t, e.post(t, "/v1/messages", strings.Replace(body, "false", "true", 1)))
		if deltas != want || names[0] != "message_start" || names[len(names)-1] != "message_stop" {
			t.Errorf("%d: events %v with %q, want %q", i, names, deltas, want)
		}

		var response struct {
			ID, Object, Status string
			Store              bool
			Output             []struct{ Content []struct{ Type, Text string } }
			Incomplete         struct{ Reason string } `json:"incomplete_details"`
			Usage              struct {
				InputTokens  int `json:"input_tokens"`
				OutputTokens int `json:"output_tokens"`
			}
		}
		body = fmt.Sprintf(`{"instructions":"s","input":[{"role":"user","content":[{"type":"input_text","text":%s}]}],"max_output_tokens":9,"stream":%t}`, quoted, false)
		e.post(t, "/v1/responses", body).into(t, &response)
		if len(response.Output) != 1 || response.Output[0].Content[0].Text != want || response.Status != "incomplete" || response.Incomplete.Reason != "max_output_tokens" || response.Store ||
			!strings.HasPrefix(response.ID, "resp_") || response.Usage.InputTokens != chat.Usage.PromptTokens || response.Usage.OutputTokens != chat.Usage.CompletionTokens {
			t.Errorf("%d: response %+v, want %q", i, response, want)
		}
		names, deltas = namedEvents(t, e.post(t, "/v1/responses", strings.Replace(body, "false", "true", 1)))
		if deltas != want || names[0] != "response.created" || names[len(names)-1] != "response.incomplete" {
			t.Errorf("%d: events %v with %q, want %q", i, names, deltas, want)
		}
	}
}

// The end of a response that reaches its limit, as each release reports it.
func TestEndOfResponses(t *testing.T) {
	for dialect, want := range map[string][2]string{
		"vllm-0.32.0": {"response.completed", "completed"}, "vllm-0.33.0": {"response.incomplete", "incomplete"},
	} {
		e := start(t, func(o *Options) { o.Dialect = dialect })
		const body = `{"model":"tiny","input":"func","max_output_tokens":2`
		names, _ := namedEvents(t, e.post(t, "/v1/responses", body+`,"stream":true}`))
		var response struct {
			Status string
			Output []struct{ Status string }
		}
		e.post(t, "/v1/responses", body+"}").into(t, &response)
		if last := names[len(names)-1]; last != want[0] || response.Status != "incomplete" || len(response.Output) != 1 || response.Output[0].Status != want[1] {
			t.Errorf("%s: the last event is %s, the response %+v, want %v", dialect, last, response, want)
		}
	}
}

// namedEvents returns the names of events, and the text of their deltas.
func namedEvents(t *testing.T, got answer) (names []string, deltas string) {
	t.Helper()
	if got.status != http.StatusOK {
		t.Fatalf("status %d: %s", got.status, got.body)
	}
	for _, event := range strings.Split(strings.TrimSpace(string(got.body)), "\n\n") {
		head, data, _ := strings.Cut(event, "\ndata: ")
		var body struct {
			Type  string
			Delta json.RawMessage
		}
		if err := json.Unmarshal([]byte(data), &body); err != nil || head != "event: "+body.Type {
			t.Fatalf("event %q: %v", event, err)
		}
		names = append(names, body.Type)
		var text string
		var block struct{ Text string }
		if json.Unmarshal(body.Delta, &text) != nil && len(body.Delta) > 0 {
			if err := json.Unmarshal(body.Delta, &block); err != nil {
				t.Fatal(err)
			}
			text = block.Text
		}
		deltas += text
	}
	return names, deltas
}

// The required fields and the errors of the Messages API and the Responses API.
func TestRefusalsOfMessagesAndResponses(t *testing.T) {
	e := start(t, fourRanks)
	for name, test := range map[string]struct {
		path, body string
		status     int
		kind, want string
		header     string
	}{
		"no model":       {"/v1/messages", `{"messages":[{"role":"user","content":"a"}],"max_tokens":1}`, 400, "invalid_request_error", "model is missing", ""},
		"wrong model":    {"/v1/messages", `{"model":"gpt","messages":[{"role":"user","content":"a"}],"max_tokens":1}`, 404, "not_found_error", `"gpt" does not exist`, ""},
		"no max_tokens":  {"/v1/messages", `{"model":"tiny","messages":[{"role":"user","content":"a"}]}`, 400, "invalid_request_error", "max_tokens is missing", ""},
		"max_tokens 0":   {"/v1/messages", `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":0}`, 400, "invalid_request_error", "max_tokens is 0", ""},
		"no messages":    {"/v1/messages", `{"model":"tiny","system":"s","max_tokens":1}`, 400, "invalid_request_error", "messages is empty", ""},
		"a system role":  {"/v1/messages", `{"model":"tiny","messages":[{"role":"system","content":"a"}],"max_tokens":1}`, 400, "invalid_request_error", `role "system"`, ""},
		"an image":       {"/v1/messages", `{"model":"tiny","messages":[{"role":"user","content":[{"type":"image"}]}],"max_tokens":1}`, 400, "invalid_request_error", `"image"`, ""},
		"no JSON":        {"/v1/messages", `{`, 400, "invalid_request_error", "not a JSON object", ""},
		"a rank":         {"/v1/messages", `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":1}`, 400, "invalid_request_error", "allowed is 0 to 3", "4"},
		"stored":         {"/v1/responses/resp_1/cancel", `{}`, 404, "invalid_request_error", "Response with id 'resp_1' not found", ""},
		"previous":       {"/v1/responses", `{"input":"a","previous_response_id":"resp_1"}`, 404, "invalid_request_error", "'resp_1' not found", ""},
		"background":     {"/v1/responses", `{"input":"a","background":true}`, 400, "invalid_request_error", "no background mode", ""},
		"no input":       {"/v1/responses", `{"instructions":"a"}`, 400, "invalid_request_error", "input is missing", ""},
		"another item":   {"/v1/responses", `{"input":[{"type":"function_call"}]}`, 400, "invalid_request_error", `"function_call"`, ""},
		"an input image": {"/v1/responses", `{"input":[{"role":"user","content":[{"type":"input_image"}]}]}`, 400, "invalid_request_error", `"input_image"`, ""},
	} {
		var header []string
		if test.header != "" {
			header = []string{"X-Data-Parallel-Rank", test.header}
		}
		got := e.post(t, test.path, test.body, header...)
		var body struct {
			Type  string
			Error struct{ Type, Message string }
		}
		if err := json.Unmarshal(got.body, &body); err != nil {
			t.Errorf("%s: %s: %v", name, got.body, err)
		}
		anthropic := strings.HasPrefix(test.path, "/v1/messages")
		if got.status != test.status || body.Error.Type != test.kind || !strings.Contains(body.Error.Message, test.want) || (body.Type == "error") != anthropic {
			t.Errorf("%s: %d %s; want %d, %s with %q", name, got.status, got.body, test.status, test.kind, test.want)
		}
	}
	if got := e.get(t, "/v1/responses/resp_1"); got.status != http.StatusNotFound {
		t.Errorf("a stored response: %d %s", got.status, got.body)
	}
}

// The header and the body do not select the rank of a response, and the body does not select the rank of a message.
func TestResponsesIgnoreTheRank(t *testing.T) {
	e := start(t, fourRanks)
	for path, body := range map[string]string{
		"/v1/responses": `{"input":"a","max_output_tokens":1,"routed_dp_rank":2}`,
		"/v1/messages":  `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":1,"routed_dp_rank":2}`,
	} {
		served := map[int]bool{}
		for range 4 {
			before := e.get(t, "/metrics").body
			var header []string
			if path == "/v1/responses" {
				header = []string{"X-Data-Parallel-Rank", "2"}
			}
			if got := e.post(t, path, body, header...); got.status != http.StatusOK {
				t.Fatalf("%s: %d %s", path, got.status, got.body)
			}
			after := e.get(t, "/metrics").body
			for rank := range 4 {
				if activations(t, before, "remote", rank) != activations(t, after, "remote", rank) {
					served[rank] = true
				}
			}
		}
		if len(served) != 4 {
			t.Errorf("%s: ranks %v serve", path, served)
		}
	}
}
