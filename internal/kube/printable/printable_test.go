// SPDX-License-Identifier: Apache-2.0

package printable

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestLine(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"plain":            {"2 of 2 replicas serve (LAR 43.2%, “µ”)", "2 of 2 replicas serve (LAR 43.2%, “µ”)"},
		"colours":          {"\x1b[1;31mCUDA error\x1b[0m: out of memory", "CUDA error: out of memory"},
		"clears screen":    {"a\x1b[2J\x1b[Hb", "a�[2J�[Hb"},
		"title":            {"a\x1b]0;owned\x07b", "a�]0;owned�b"},
		"C1 introducer":    {"a\u009b31mb\u0090c\u009c", "a�31mb�c�"},
		"lines":            {"one\r\n\ttwo\u2028three\u2029four\u0085five\vsix", "one two three four five six"},
		"null, bell, DEL":  {"a\x00b\x07c\x7f", "a�b�c�"},
		"bidi":             {"\u202aa\u202bb\u202cc\u202dd\u202ee \u2066f\u2067g\u2068h\u2069 \u200e\u200f\u061c", "�a�b�c�d�e �f�g�h� ���"},
		"invisible":        {"ad\u200bmin\ufeff\u2060\u00ad\u034f\u3164\ufe0f\U000e0041", "ad�min�������"},
		"invalid":          {"a\xff\xc0\xafb\xed\xa0\x80", "a���b���"},
		"spaces":           {"  a \u00a0\u3000 b  ", "a b"},
		"escape at an end": {"a\x1b", "a�"},
		"unfinished":       {"a\x1b[31", "a�[31"},
		"colour in escape": {"\x1b\x1b[0m[31mb", "�[31mb"},
	} {
		if got := Line(test.text, 100); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
	if got := Line(strings.Repeat("long", 500), 1024); len(got) != 1024 || !strings.HasSuffix(got, "l...") {
		t.Errorf("long text: %d bytes, end %q", len(got), got[1000:])
	}
	if got := Line("ééé", 6); got != "ééé" {
		t.Errorf("text of the maximum length: %q", got)
	}
	if got := Line("éééé", 6); got != "é..." {
		t.Errorf("truncated within a character: %q", got)
	}
}

// harmful reports whether a text contains unsafe characters. It states the rules independently of the code.
func harmful(text string) bool {
	return !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool {
		return r < 0x20 || r >= 0x7f && r <= 0xa0 || r == 0xad || r >= 0x200b && r <= 0x200f || r >= 0x2028 && r <= 0x202e ||
			r >= 0x2060 && r <= 0x206f || r == 0xfeff || r >= 0xe0000 && r <= 0xe0fff || unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Co, r)
	})
}

func FuzzLine(f *testing.F) {
	for _, seed := range []string{"", "a b", "\x1b[31mred\x1b[0m", "\x1b]8;;http://x\x1b\\y", "\u009b2J", "\u202egnp.exe", "a\u200bb", "\xff\xfe", "x\r\ny\u2028z", "\U000e0041"} {
		f.Add(seed, 16)
	}
	f.Fuzz(func(t *testing.T, text string, limit int) {
		limit = 3 + int(uint(limit)%2000)
		line := Line(text, limit)
		if harmful(line) || len(line) > limit || line != strings.TrimSpace(line) || strings.Contains(line, "  ") {
			t.Fatalf("%q becomes %q with a limit of %d", text, line, limit)
		}
		if again := Line(line, limit); again != line {
			t.Fatalf("%q becomes %q, and then %q", text, line, again)
		}
		runes := Runes(text)
		if harmful(runes) || utf8.RuneCountInString(runes) != utf8.RuneCountInString(text) {
			t.Fatalf("%q becomes %q", text, runes)
		}
		encoded, err := json.Marshal(map[string]string{text: text})
		if err != nil {
			t.Fatal(err)
		}
		var written bytes.Buffer
		if n, err := JSON(&written).Write(encoded); err != nil || n != len(encoded) || harmful(written.String()) {
			t.Fatalf("%d of %d bytes, %v: %s", n, len(encoded), err, written.String())
		}
		var before, after map[string]string
		if json.Unmarshal(encoded, &before) != nil || json.Unmarshal(written.Bytes(), &after) != nil {
			t.Fatalf("invalid JSON: %s", written.String())
		}
		for key, value := range before {
			if after[key] != value {
				t.Fatalf("%q becomes %q", before, after)
			}
		}
	})
}

// TestSteady checks that two attempts that fail alike give the same message, and two that differ do not.
func TestSteady(t *testing.T) {
	const (
		expired = "x509: certificate has expired or is not yet valid: current time 2026-11-27T20:41:5%dZ is after 2026-11-27T20:40:57Z"
		early   = "x509: certificate has expired or is not yet valid: current time 2026-11-27T20:41:5%dZ is before 2027-11-27T20:40:57Z"
		reset   = `Get "https://store:8443/v1": read tcp 10.0.0.9:4180%d->10.0.0.1:8443: read: connection reset by peer`
		resolve = "lookup store on 10.96.0.10:53: read udp [fd00::9]:4180%d->[fd00::10]:53: i/o timeout"
	)
	for format, want := range map[string]string{
		expired: "x509: certificate has expired or is not yet valid: now is after 2026-11-27T20:40:57Z",
		early:   "x509: certificate has expired or is not yet valid: now is before 2027-11-27T20:40:57Z",
		reset:   `Get "https://store:8443/v1": read tcp 10.0.0.1:8443: read: connection reset by peer`,
		resolve: "lookup store on 10.96.0.10:53: read udp [fd00::10]:53: i/o timeout",
	} {
		for attempt := range 2 {
			if got := Steady(fmt.Sprintf(format, attempt)); got != want {
				t.Errorf("%q, want %q", got, want)
			}
		}
	}
	if refused := "dial tcp 10.0.0.1:8443: connect: connection refused"; Steady(refused) != refused {
		t.Errorf("%q changed", refused)
	}
}
