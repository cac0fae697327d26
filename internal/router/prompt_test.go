package router

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestPrompt(t *testing.T) {
	texts := func(texts ...string) prompt { return prompt{texts: texts} }
	ids := func(ids ...int32) prompt { return prompt{ids: ids} }
	const completions, chat, native = "/v1/completions", "/v1/chat/completions", "/generate"
	cases := map[string]struct {
		path, body string
		want       prompt
	}{
		"string":                 {completions, `{"prompt":"a \u00e9"}`, texts("a é")},
		"strings":                {completions, `{"prompt":[ "a","b"]}`, texts("a", "b")},
		"ids":                    {completions, `{"prompt":[1, 22,333]}`, ids(1, 22, 333)},
		"lists of ids":           {completions, `{"prompt":[[1,2],[3]]}`, prompt{ids: []int32{1, 2, 3}, nested: true}},
		"empty string":           {completions, `{"prompt":""}`, prompt{}},
		"empty list":             {completions, `{"prompt":[]}`, prompt{}},
		"no prompt":              {completions, `{"messages":[{"content":"a"}],"text":"b"}`, prompt{}},
		"null":                   {completions, `{"prompt":null}`, prompt{}},
		"object":                 {completions, `{"prompt":{"a":1}}`, prompt{}},
		"mixed list":             {completions, `{"prompt":["a",1]}`, prompt{}},
		"mixed list of ids":      {completions, `{"prompt":[1,"a"]}`, prompt{}},
		"negative id":            {completions, `{"prompt":[-1]}`, prompt{}},
		"fractional id":          {completions, `{"prompt":[1.5]}`, prompt{}},
		"huge id":                {completions, `{"prompt":[99999999999999999999]}`, prompt{}},
		"chat":                   {chat, `{"messages":[{"role":"system","content":"a"},{"role":"user","content":"b"}]}`, texts("a", "b")},
		"chat in parts":          {chat, `{"messages":[{"content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"x"}},{"type":"text","text":"b"}]}]}`, texts("a", "b")},
		"chat without content":   {chat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[]},{"content":"a"},{"content":7}]}`, texts("a")},
		"chat of another type":   {chat, `{"messages":"a"}`, prompt{}},
		"native text":            {native, `{"text":"a"}`, texts("a")},
		"native texts":           {native, `{"text":["a","b"]}`, texts("a", "b")},
		"native ids":             {native, `{"input_ids":[1,2]}`, ids(1, 2)},
		"native ids and no text": {native, `{"text":null,"input_ids":[1,2]}`, ids(1, 2)},
		"not JSON":               {native, `{"text":"a"`, prompt{}},
		"no inference":           {"/tokenize", `{"prompt":"a"}`, prompt{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := newRequest(tc.path, "", []byte(tc.body)).prompt
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(prompt{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// What is scored is bounded, the load is not.
func TestLongPrompt(t *testing.T) {
	list := strings.Repeat("7,", readTokens+99) + "7"
	r := newRequest("/generate", "", []byte(`{"input_ids":[`+list+`],"sampling_params":{"max_new_tokens":0}}`))
	if len(r.prompt.ids) != readTokens || r.prompt.more != 100 {
		t.Errorf("%d ids and %d more, want %d and 100", len(r.prompt.ids), r.prompt.more, readTokens)
	}
	p, _ := plans(t)
	if r.score(p.layout); r.forecast.tokens != readTokens+100+1 {
		t.Errorf("a load of %d tokens, want %d", r.forecast.tokens, readTokens+100+1)
	}
	// Three bytes a character: the bound falls inside one.
	text := strings.Repeat("語", readBytes/3+1000)
	r = newRequest("/v1/completions", "", fmt.Appendf(nil, `{"prompt":[%q,"b"]}`, text))
	if got := r.prompt.texts; len(got[0]) > readBytes || len(got[0]) < readBytes-3 || !utf8.ValidString(got[0]) {
		t.Errorf("a text of %d bytes is scored, valid %v", len(got[0]), utf8.ValidString(got[0]))
	}
	if want := len(text) - readBytes; r.prompt.more < want/bytesPerToken-1 || r.prompt.more > want/bytesPerToken+1 {
		t.Errorf("%d more tokens, want about %d", r.prompt.more, want/bytesPerToken)
	}
}

// Whatever clients send, reading it ends, stays within its bounds and tells a load.
func FuzzRequest(f *testing.F) {
	for _, body := range []string{
		`{"prompt":"a"}`, `{"prompt":[1,[2]]}`, `{"messages":[{"content":[{"text":"a"}]}]}`, `{"text":["a"],"input_ids":[1]}`,
		`{"max_tokens":-1,"sampling_params":{"max_new_tokens":5}}`, `{"sampling_params":[{}]}`, `[1]`, `"x"`, ``, `{"prompt":"\ud800"}`,
	} {
		for path := range inference {
			f.Add(path, []byte(body))
		}
	}
	f.Fuzz(func(t *testing.T, path string, data []byte) {
		r := newRequest(path, "id", data)
		if r.tokens < 1 || r.output < 0 || r.output > largestOutput || r.prompt.more < 0 {
			t.Fatalf("load of %d tokens, %d of output, %d more", r.tokens, r.output, r.prompt.more)
		}
		size := 0
		for _, text := range r.prompt.texts {
			if size += len(text); text == "" || !utf8.ValidString(text) {
				t.Fatalf("text %q", text)
			}
		}
		if size > readBytes || len(r.prompt.ids) > readTokens {
			t.Fatalf("%d bytes and %d ids are to be scored", size, len(r.prompt.ids))
		}
		for _, id := range r.prompt.ids {
			if id < 0 {
				t.Fatalf("token id %d", id)
			}
		}
		if !r.prompt.empty() && (!inference[path] || !json.Valid(data)) {
			t.Fatalf("a prompt %+v out of nothing", r.prompt)
		}
	})
}
