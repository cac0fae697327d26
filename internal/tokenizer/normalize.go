package tokenizer

import (
	"encoding/json"
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"

	"github.com/semmoe/operator/internal/tokenizer/pattern"
)

// normalizer rewrites a text before it is cut.
type normalizer func(text string) string

// fileNormalizer is any normalizer of a tokenizer.json.
type fileNormalizer struct {
	Type        string           `json:"type"`
	Normalizers []fileNormalizer `json:"normalizers"` // Sequence
	Prepend     string           `json:"prepend"`
	Pattern     *filePattern     `json:"pattern"` // Replace
	Content     string           `json:"content"`
}

// newNormalizers lists the steps of a file's normalizer.
func newNormalizers(raw json.RawMessage) ([]normalizer, error) {
	var f fileNormalizer
	if set, err := readJSON(raw, "normalizer", &f); err != nil || !set {
		return nil, err
	}
	return f.steps()
}

func (f *fileNormalizer) steps() ([]normalizer, error) {
	switch f.Type {
	case "Sequence":
		var steps []normalizer
		for _, one := range f.Normalizers {
			more, err := one.steps()
			if err != nil {
				return nil, err
			}
			steps = append(steps, more...)
		}
		return steps, nil
	case "NFC":
		return []normalizer{nfc}, nil
	case "NFD":
		return []normalizer{norm.NFD.String}, nil
	case "NFKC":
		return []normalizer{norm.NFKC.String}, nil
	case "NFKD":
		return []normalizer{norm.NFKD.String}, nil
	case "Lowercase":
		return []normalizer{lowercase}, nil
	case "Prepend":
		return []normalizer{func(text string) string { return f.Prepend + text }}, nil
	case "Replace":
		return f.replace()
	}
	return nil, unsupported("normalizer of type %q; supported are Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Prepend and Replace", f.Type)
}

func (f *fileNormalizer) replace() ([]normalizer, error) {
	if f.Pattern != nil && f.Pattern.String != nil && *f.Pattern.String != "" {
		return []normalizer{func(text string) string { return strings.ReplaceAll(text, *f.Pattern.String, f.Content) }}, nil
	}
	if f.Pattern == nil || f.Pattern.Regex == nil {
		return nil, unsupported("normalizer Replace without a pattern")
	}
	compiled, err := pattern.Compile(*f.Pattern.Regex)
	if err != nil {
		return nil, unsupported("normalizer Replace: %w", err)
	}
	find := findPattern(compiled)
	return []normalizer{func(text string) string {
		var written strings.Builder
		for _, m := range find(nil, text, []span{{0, len(text)}}) {
			if m.found {
				written.WriteString(f.Content)
			} else {
				written.WriteString(text[m.start:m.end])
			}
		}
		return written.String()
	}}, nil
}

// nfc is Unicode's composed form. All text of characters below U+0300, the first combining one, is in it.
func nfc(text string) string {
	const firstCombining = 0xcc // the first byte of U+0300
	for i := range len(text) {
		if text[i] >= firstCombining {
			return norm.NFC.String(text)
		}
	}
	return text
}

// lowercase maps each character by itself, whatever stands around it. The capital I with a dot is the one character whose
// lower case has two.
func lowercase(text string) string {
	return strings.ReplaceAll(strings.Map(func(r rune) rune {
		if r == 'İ' {
			return r
		}
		return unicode.ToLower(r)
	}, text), "İ", "i\u0307")
}
