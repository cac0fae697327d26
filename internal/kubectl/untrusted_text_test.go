// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"encoding/json"
	"errors"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// hostile is a text with escape sequences and control characters. An engine, a checkpoint or a server may return such a
// text, and conditions quote it.
const hostile = "\x1b]0;owned\x07 \x1b[2J\x1b[31m\u009b1A\u0085\x7f\b\r\nerror: all is well \u202egnp.exe\u2066\u200b\ufeff"

// quoting lists the fields of objects that quote untrusted text.
var quoting = map[string]bool{"message": true, "reason": true, "hardware": true, "family": true}

// quote appends the hostile text to each quoting field of a value.
func quote(value any) {
	switch v := value.(type) {
	case map[string]any:
		for key, field := range v {
			if text, ok := field.(string); ok && quoting[key] {
				v[key] = text + hostile
			}
			quote(field)
		}
	case []any:
		for _, item := range v {
			quote(item)
		}
	}
}

// TestUntrustedText verifies that untrusted text in objects and errors reaches the terminal only as plain text: without
// escape sequences and without forged lines.
func TestUntrustedText(t *testing.T) {
	quoted := 0
	for name, g := range goldens() {
		for i, object := range g.objects {
			var fields map[string]any
			text, err := json.Marshal(object)
			if err == nil {
				err = json.Unmarshal(text, &fields)
			}
			quote(fields)
			changed := reflect.New(reflect.TypeOf(object).Elem()).Interface()
			if text, _ := json.Marshal(fields); err == nil {
				err = json.Unmarshal(text, changed)
			}
			if err != nil {
				t.Fatal(err)
			}
			g.objects[i] = changed.(client.Object)
		}
		if g.getError != nil {
			g.getError = errors.New(g.getError.Error() + hostile)
		}
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			shown, _ := g.run(t)
			if strings.Contains(shown, "all is well") {
				quoted++
			}
			for _, line := range strings.Split(colors.ReplaceAllString(shown, ""), "\n") {
				if strings.HasPrefix(line, "error: all is well") {
					t.Errorf("forged line %q", line)
				}
				if !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf) }) {
					t.Errorf("line with control characters: %q", line)
				}
			}
		})
	}
	if quoted < 20 {
		t.Errorf("only %d commands quote the text, want at least 20", quoted)
	}
}

// colors matches the escape sequences that the plugin writes.
var colors = regexp.MustCompile("\x1b\\[(1|2|31|32|33|0)m|\x1b\\[H\x1b\\[2J")
