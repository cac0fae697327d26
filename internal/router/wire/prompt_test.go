// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/internal/engine"
)

func TestPrompt(t *testing.T) {
	texts := func(texts ...string) Prompt { return Prompt{Texts: texts} }
	ids := func(ids ...int32) Prompt { return Prompt{IDs: ids} }
	const completions, chat, native = "/v1/completions", "/v1/chat/completions", "/generate"
	cases := map[string]struct {
		path, body string
		want       Prompt
	}{
		"string":            {completions, `{"prompt":"a \u00e9"}`, texts("a é")},
		"strings":           {completions, `{"prompt":[ "a","b"]}`, texts("a", "b")},
		"ids":               {completions, `{"prompt":[1, 22,333]}`, ids(1, 22, 333)},
		"lists of ids":      {completions, `{"prompt":[[1,2],[3]]}`, Prompt{IDs: []int32{1, 2, 3}, Nested: true}},
		"empty string":      {completions, `{"prompt":""}`, Prompt{}},
		"empty list":        {completions, `{"prompt":[]}`, Prompt{}},
		"no prompt":         {completions, `{"messages":[{"content":"a"}],"text":"b"}`, Prompt{}},
		"null":              {completions, `{"prompt":null}`, Prompt{}},
		"object":            {completions, `{"prompt":{"a":1}}`, Prompt{}},
		"mixed list":        {completions, `{"prompt":["a",1]}`, Prompt{}},
		"mixed list of ids": {completions, `{"prompt":[1,"a"]}`, Prompt{}},
		"negative id":       {completions, `{"prompt":[-1]}`, Prompt{}},
		"fractional id":     {completions, `{"prompt":[1.5]}`, Prompt{}},
		"huge id":           {completions, `{"prompt":[99999999999999999999]}`, Prompt{}},
		"chat":              {chat, `{"messages":[{"role":"system","content":"a"},{"role":"user","content":"b"}]}`, texts("a", "b")},
		"chat in parts": {chat, `{"messages":[{"content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"x"}},{"type":"text","text":"b"}]}]}`,
			Prompt{Texts: []string{"a", "b"}, Media: Media{1, 44}}},
		"chat with a refusal":   {chat, `{"messages":[{"content":[{"type":"refusal","refusal":"no"},{"type":"thinking","thinking":"a"},"b",{}]}]}`, Prompt{}},
		"chat with other parts": {chat, `{"messages":[{"content":[{"type":"video_url"},{"type":"input_audio"}]},{"content":[{"type":"input_image"}]}]}`, Prompt{Media: Media{3, 64}}},
		"native images":         {native, `{"text":"a","image_data":["x","y"],"audio_data":"z","video_data":null}`, Prompt{Texts: []string{"a"}, Media: Media{3, 9}}},
		"images of a batch":     {native, `{"input_ids":[1],"image_data":[["x"],null,["y",["z"]]]}`, Prompt{IDs: []int32{1}, Media: Media{3, 11}}},
		"native embeddings":     {native, `{"input_embeds":[[1,2],[3,4]]}`, Prompt{Media: Media{1, 13}}},
		"embeddings":            {completions, `{"prompt":"a","prompt_embeds":"x"}`, Prompt{Texts: []string{"a"}, Media: Media{1, 3}}},
		"chat without content":  {chat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[]},{"content":"a"},{"content":7}]}`, texts("a")},
		"calls of tools": {chat, `{"messages":[{"content":"a","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}},{"function":{"name":"g"}}]},{"role":"tool","content":"b"}]}`,
			texts("a", "f", `{"x":1}`, "g", "b")},
		"arguments as an object": {chat, `{"messages":[{"content":null,"tool_calls":[{"function":{"name":"f","arguments":{"x": 1}}},{"function":{"name":null,"arguments":null}},{"function":7},7]}]}`, texts("f", `{"x": 1}`)},
		"a call of a function":   {chat, `{"messages":[{"function_call":{"name":"f","arguments":"{}"}}]}`, texts("f", "{}")},
		"tools":                  {chat, `{"tools":[{"type": "function"}],"functions":[{"name":"g"}],"messages":[{"content":"a"}]}`, Prompt{Texts: []string{"a"}, Tools: `[{"type": "function"}][{"name":"g"}]`}},
		"no tools":               {chat, `{"tools":[],"functions":null,"messages":[{"content":"a"}]}`, texts("a")},
		"tools of another type":  {chat, `{"tools":{"type":"function"},"messages":[{"content":"a"}]}`, texts("a")},
		"tools of no chat":       {completions, `{"tools":[{}],"prompt":"a"}`, texts("a")},
		"chat of another type":   {chat, `{"messages":"a"}`, Prompt{}},
		"a batch of chats":       {"/v1/chat/completions/batch", `{"messages":[[{"content":"a"},{"content":[{"type":"text","text":"b"}]}],[{"content":"c"}],[[{"content":"too deep"}]]]}`, texts("a", "b", "c")},
		"token ids of vLLM":      {"/inference/v1/generate", `{"token_ids":[1,2],"sampling_params":{}}`, ids(1, 2)},
		"a reranked text":        {"/v1/rerank", `{"query":"q","documents":["a","b"]}`, texts("q", "a", "b")},
		"invocation of a chat":   {"/invocations", `{"messages":[{"content":"a"}],"tools":[{}]}`, Prompt{Texts: []string{"a"}, Tools: "[{}]"}},
		"other invocation":       {"/invocations", `{"prompt":"a"}`, texts("a")},
		"texts and ids":          {"/generate", `{"text":["a"],"input_ids":[1]}`, texts("a")},
		"native text":            {native, `{"text":"a"}`, texts("a")},
		"native texts":           {native, `{"text":["a","b"]}`, texts("a", "b")},
		"native ids":             {native, `{"input_ids":[1,2]}`, ids(1, 2)},
		"native ids and no text": {native, `{"text":null,"input_ids":[1,2]}`, ids(1, 2)},
		"a message":              {messagesPath, `{"system":"s","messages":[{"role":"user","content":"a"}],"max_tokens":1}`, texts("s", "a")},
		"messages in blocks": {messagesPath, `{"system":[{"type":"text","text":"s"}],"messages":[{"content":[{"type":"text","text":"a"},{"type":"image","source":{}},{"type":"thinking","thinking":"t"}]}]}`,
			Prompt{Texts: []string{"s", "a"}, Media: Media{1, 28}}},
		"messages with calls": {messagesPath, `{"messages":[{"content":[{"type":"tool_use","id":"1","name":"f","input":{"x": 1}}]},{"content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"r"},{"type":"document"}]},{"type":"tool_result","content":"q"}]}],"tools":[{"name":"f"}]}`,
			Prompt{Texts: []string{"f", `{"x": 1}`, "r", "q"}, Media: Media{1, 19}, Tools: `[{"name":"f"}]`}},
		"messages of other types": {messagesPath, `{"system":7,"messages":[7,{"content":null},{"content":[null,7,[],{"type":7,"text":8}]}]}`, Prompt{}},
		"deep blocks":             {messagesPath, `{"messages":[{"content":[{"content":[{"content":[{"text":"in"},{"content":[{"text":"too deep"}]}]}]}]}]}`, texts("in")},
		"a response":              {ResponsesPath, `{"instructions":"s","input":"a"}`, texts("s", "a")},
		"a response to items": {ResponsesPath, `{"input":[{"role":"user","content":"a"},{"type":"message","role":"user","content":[{"type":"input_text","text":"b"},{"type":"input_image","image_url":"x"}]},{"type":"function_call","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"1","output":"r"}]}`,
			Prompt{Texts: []string{"a", "b", "f", "{}", "r"}, Media: Media{1, 38}}},
		"not JSON":     {native, `{"text":"a"`, Prompt{}},
		"no inference": {"/tokenize", `{"prompt":"a"}`, Prompt{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := PromptOf(tc.path, ParseBody([]byte(tc.body)))
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if media := MediaOf(tc.path, ParseBody([]byte(tc.body))); media != tc.want.Media {
				t.Errorf("media %v without texts, want %v", media, tc.want.Media)
			}
		})
	}
}

// TestLongPrompt checks that the part of a prompt that is read is bounded, and that the rest is counted.
func TestLongPrompt(t *testing.T) {
	list := strings.Repeat("7,", ReadTokens+99) + "7"
	p := PromptOf("/generate", ParseBody([]byte(`{"input_ids":[`+list+`]}`)))
	if len(p.IDs) != ReadTokens || p.More != 100 {
		t.Errorf("%d ids and %d more, want %d and 100", len(p.IDs), p.More, ReadTokens)
	}
	// Three bytes per character: the bound falls inside a character.
	text := strings.Repeat("語", readBytes/3+1000)
	p = PromptOf("/v1/completions", ParseBody(fmt.Appendf(nil, `{"prompt":[%q,"b"]}`, text)))
	if got := p.Texts; len(got[0]) > readBytes || len(got[0]) < readBytes-3 || !utf8.ValidString(got[0]) {
		t.Errorf("a text of %d bytes is read, valid %v", len(got[0]), utf8.ValidString(got[0]))
	}
	if want := len(text) - readBytes; p.More < want/BytesPerToken-1 || p.More > want/BytesPerToken+1 {
		t.Errorf("%d more tokens, want about %d", p.More, want/BytesPerToken)
	}
}

// TestLongTools checks that four bytes of the tools count as a token, also beyond the part that is read.
func TestLongTools(t *testing.T) {
	list := `["` + strings.Repeat("x", readBytes) + `"]`
	p := PromptOf("/v1/chat/completions", ParseBody([]byte(`{"tools":`+list+`,"functions":["abcdef"]}`)))
	if p.Tools != list[:readBytes] || p.More != 1+10/BytesPerToken {
		t.Errorf("%d bytes of tools and %d more tokens, want %d and 3", len(p.Tools), p.More, readBytes)
	}
}

// FuzzBody checks that parsing arbitrary bodies ends, stays within its bounds and returns a load. Routes without
// inference have no prompt.
func FuzzBody(f *testing.F) {
	var inference []string
	for _, api := range engine.APIs() {
		if api.Form != engine.NoPrompt {
			inference = append(inference, api.Path)
		}
	}
	for _, body := range []string{
		`{"prompt":"a"}`, `{"prompt":[1,[2]]}`, `{"messages":[{"content":[{"text":"a"}]}]}`, `{"text":["a"],"input_ids":[1]}`,
		`{"tools":[{}],"messages":[{"tool_calls":[{"function":{"name":"f","arguments":{"x":1}}}],"function_call":{"arguments":"{}"}}]}`,
		`{"system":[{"text":"s"}],"messages":[{"content":[{"type":"tool_result","content":[{"type":"image","source":{}}]},{"type":"tool_use","name":"f","input":{"x":1}}]}]}`,
		`{"instructions":"s","input":[{"type":"function_call_output","output":[{"text":"a"}]},{"arguments":"\ud800"}],"max_output_tokens":3}`,
		`{"max_tokens":-1,"sampling_params":{"max_new_tokens":5}}`, `{"sampling_params":[{}]}`, `[1]`, `"x"`, ``, `{"prompt":"\ud800"}`,
	} {
		for _, path := range append(inference, "/tokenize") {
			f.Add(path, []byte(body))
		}
	}
	f.Fuzz(func(t *testing.T, path string, data []byte) {
		b := ParseBody(data)
		p := PromptOf(path, b)
		answers, _ := b.Answers(path)
		if output := b.Output(answers); output < 0 || output > maxOutput || p.More < 0 {
			t.Fatalf("load of %d tokens of output, %d more", output, p.More)
		}
		size := 0
		for _, text := range p.Texts {
			if size += len(text); text == "" || !utf8.ValidString(text) {
				t.Fatalf("text %q", text)
			}
		}
		if p.Media.Bytes > len(data) || p.Media.Parts < 0 {
			t.Fatalf("%+v in %d bytes", p.Media, len(data))
		}
		if size > readBytes || len(p.IDs) > ReadTokens || len(p.Tools) > readBytes {
			t.Fatalf("%d bytes and %d ids are to be scored", size, len(p.IDs))
		}
		for _, id := range p.IDs {
			if id < 0 {
				t.Fatalf("token id %d", id)
			}
		}
		if !p.Empty() && (!slices.Contains(inference, path) || !json.Valid(data)) {
			t.Fatalf("a prompt %+v out of nothing", p)
		}
	})
}

// TestReadsTheTablesOfRoutes checks that the prompt and the limit of every route are read from the members that the
// table of routes names.
func TestReadsTheTablesOfRoutes(t *testing.T) {
	for _, api := range engine.APIs() {
		for _, name := range api.Prompt {
			value := `"word"`
			if name == chatMember {
				value = `[{"role":"user","content":"word"}]`
			}
			if got := PromptOf(api.Path, ParseBody([]byte(`{"`+name+`":`+value+`}`))); !slices.Equal(got.Texts, []string{"word"}) {
				t.Errorf("%s: the prompt in %s is read as %+v", api.Path, name, got)
			}
		}
		if api.Limit == "" {
			continue
		}
		body := "7"
		for _, name := range slices.Backward(strings.Split(api.Limit, ".")) {
			body = `{"` + name + `":` + body + `}`
		}
		if got := ParseBody([]byte(body)).Output(1); got != 7 {
			t.Errorf("%s: the limit in %s is read as %d", api.Path, body, got)
		}
	}
}
