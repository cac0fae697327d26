// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestUsage checks that the token counts are read from every path that engines use, and that the last event counts.
func TestUsage(t *testing.T) {
	var usage Usage
	for _, tc := range []struct {
		data string
		want Usage
	}{
		{`{"choices":[],"usage":null}`, Usage{}},
		{`[{"meta_info":{"prompt_tokens":3}}]`, Usage{}},
		{`{"output_ids":[1],"meta_info":{"prompt_tokens":3,"completion_tokens":1}}`, Usage{Prompt: 3, Completion: 1, Output: []int32{1}}},
		{`{"output_ids":[1,2],"meta_info":{"prompt_tokens":3,"completion_tokens":2,"dp_rank":3}}`, Usage{Prompt: 3, Completion: 2, Output: []int32{1, 2}, Rank: new(3)}},
		{`[DONE]`, Usage{Prompt: 3, Completion: 2, Output: []int32{1, 2}, Rank: new(3)}},
		{`{"usage":{"prompt_tokens":7,"completion_tokens":2}}`, Usage{Prompt: 7, Completion: 2}},
	} {
		usage.Read([]byte(tc.data))
		if diff := cmp.Diff(tc.want, usage); diff != "" {
			t.Errorf("after %s (-want +got):\n%s", tc.data, diff)
		}
	}
}
