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

// hostile is what an engine, a checkpoint or a server may answer, and conditions quote.
const hostile = "\x1b]0;owned\x07 \x1b[2J\x1b[31m\u009b1A\u0085\x7f\b\r\nerror: all is well \u202egnp.exe\u2066\u200b\ufeff"

// quoting are the fields of objects that quote others.
var quoting = map[string]bool{"message": true, "reason": true, "hardware": true, "family": true}

// quote puts the hostile text into each field of a value that quotes others.
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

// Nothing that objects or errors quote reaches the terminal as more than text: neither escape sequences, nor lines that another wrote.
func TestHostileText(t *testing.T) {
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
		if g.fails != nil {
			g.fails = errors.New(g.fails.Error() + hostile)
		}
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			shown, _ := g.run(t)
			if strings.Contains(shown, "all is well") {
				quoted++
			}
			for _, line := range strings.Split(colours.ReplaceAllString(shown, ""), "\n") {
				if strings.HasPrefix(line, "error: all is well") {
					t.Errorf("another wrote the line %q", line)
				}
				if !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf) }) {
					t.Errorf("shown raw: %q", line)
				}
			}
		})
	}
	if quoted < 20 {
		t.Errorf("%d commands quote the text", quoted)
	}
}

// colours are the sequences that the plugin writes.
var colours = regexp.MustCompile("\x1b\\[(1|2|31|32|33|0)m|\x1b\\[H\x1b\\[2J")
