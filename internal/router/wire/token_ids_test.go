// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"strings"
	"testing"
)

func TestTokenOutside(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt":[0,4095]}`: "", `{"prompt":[4096]}`: "4096", `{"prompt":[-1]}`: "-1", `{"prompt":[[1,2],[3,9999]]}`: "9999",
		`{"prompt":[1,99999999999999999999]}`: "99999999999999999999", `{"prompt":[4.096e3]}`: "4.096e3", `{"prompt":[4095.0]}`: "",
		`{"prompt":[1e400]}`: "1e400", `{"prompt":[-0]}`: "", `{"prompt":"9999"}`: "", `{"prompt":["9999","-1"]}`: "",
		`{"input_ids":["9999"]}`: `"9999"`, `{"input_ids":["12"]}`: "", `{"token_ids":[7,4096]}`: "4096",
		`{"text":"a","input_ids":[ 4096 ]}`: "4096", `{"messages":[],"input_ids":[5000]}`: "5000", `{"input":[1,4096]}`: "4096",
		`{"input":[{"text":"a","number":9999}]}`: "", `{"query":[1],"items":[[2],[4096]]}`: "4096", `{"items":["a \" [9999",[9999]]}`: "9999",
		`{"instances":[{"text":"a"},{"input_ids":[4096]}]}`: "4096", `{"instances":[{"instances":[{"input_ids":[4096]}]}]}`: "",
		`{"max_tokens":9999,"stop_token_ids":[9999]}`: "", `{"prompt":[9999`: "", `[{"prompt":[9999]}]`: "", `{"prompt":[]}`: "", `{"prompt":null}`: "",
	} {
		id, found := ParseBody([]byte(body)).TokenOutside(4096)
		if id != want || found != (want != "") {
			t.Errorf("%s: %q, %v, want %q", body, id, found, want)
		}
	}
	if id, _ := ParseBody([]byte(`{"prompt":[` + strings.Repeat("9", 1000) + `]}`)).TokenOutside(4096); len(id) != maxShownID {
		t.Errorf("an id of 1,000 digits is shown as %q", id)
	}
}
