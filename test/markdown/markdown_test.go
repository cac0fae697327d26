// SPDX-License-Identifier: Apache-2.0

package markdown

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

const document = "# What `semmoe` does\n" +
	"\n" +
	"See [drift](drift.md#the-test) and `[no](link)`.\n" +
	"\n" +
	"<!-- not run: needs GPUs -->\n" +
	"```sh\n" +
	"semmoe solve # [no](link)\n" +
	"```\n" +
	"1. first\n" +
	"   ```yaml\n" +
	"   a:\n" +
	"     b: 1\n" +
	"   ```\n" +
	"\n" +
	"## It's [here](there.md), twice\n"

func TestDocument(t *testing.T) {
	for what, of := range map[string]struct{ want, got any }{
		"blocks": {[]Block{
			{Line: 7, Language: "sh", Mark: "not run: needs GPUs", Text: "semmoe solve # [no](link)\n"},
			{Line: 11, Language: "yaml", Text: "a:\n  b: 1\n"},
		}, Blocks(document)},
		"links":   {[]Link{{3, "drift.md#the-test"}, {15, "there.md"}}, Links(document)},
		"spans":   {[]string{"semmoe", "[no](link)"}, Spans(document)},
		"anchors": {map[string]bool{"what-semmoe-does": true, "its-here-twice": true}, Anchors(document)},
	} {
		if diff := cmp.Diff(of.want, of.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}
