// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"encoding/json"
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"

	"github.com/semmoe/operator/internal/model/tokenizer/pattern"
)

// normalizer rewrites a text before it is cut into pieces.
type normalizer func(text string) string

// fileNormalizer contains the fields of all normalizers of a tokenizer.json.
type fileNormalizer struct {
	Type        string           `json:"type"`
	Normalizers []fileNormalizer `json:"normalizers"` // Sequence
	Prepend     string           `json:"prepend"`
	Pattern     *filePattern     `json:"pattern"` // Replace
	Content     string           `json:"content"`
}

// The limits of a pipeline bound the time and the memory per text for every tokenizer.json. Known families have at most
// 5 steps, and normalizers that write at most 12 bytes for each byte.
const (
	maxSteps  = 64
	maxGrowth = 128
)

// normalizers contains the steps of a file's normalizer.
type normalizers struct {
	steps []normalizer
	// growth is the maximum number of bytes that the steps write for each byte of a text.
	growth int
}

// newNormalizers returns the steps of a file's normalizer. It refuses steps that together can make a text more than
// maxGrowth times as long.
func newNormalizers(raw json.RawMessage) ([]normalizer, error) {
	var f fileNormalizer
	if set, err := readJSON(raw, "normalizer", &f); err != nil || !set {
		return nil, err
	}
	n := normalizers{growth: 1}
	err := n.add(&f)
	return n.steps, err
}

func (n *normalizers) add(f *fileNormalizer) error {
	if f.Type == "Sequence" {
		for i := range f.Normalizers {
			if err := n.add(&f.Normalizers[i]); err != nil {
				return err
			}
		}
		return nil
	}
	step, growth, err := f.step(n.growth)
	switch {
	case err != nil:
		return err
	case len(n.steps) == maxSteps:
		return unsupported("normalizer with more than %d steps", maxSteps)
	case growth > maxGrowth:
		return unsupported("normalizer: the steps up to %s write up to %d bytes per byte of text; the maximum is %d", f.Type, growth, maxGrowth)
	}
	n.steps, n.growth = append(n.steps, step), growth
	return nil
}

// Growth of Unicode's normal forms in UTF-8 (Unicode Standard Annex #15, section 9.2) and of lower-casing, which
// replaces an invalid byte by U+FFFD.
const (
	canonicalGrowth     = 3
	compatibilityGrowth = 11
	lowercaseGrowth     = 3
)

// step returns the normalizer of one step and the growth after it. before is the growth after the previous steps.
func (f *fileNormalizer) step(before int) (step normalizer, growth int, err error) {
	switch f.Type {
	case "NFC":
		return nfc, before * canonicalGrowth, nil
	case "NFD":
		return norm.NFD.String, before * canonicalGrowth, nil
	case "NFKC":
		return norm.NFKC.String, before * compatibilityGrowth, nil
	case "NFKD":
		return norm.NFKD.String, before * compatibilityGrowth, nil
	case "Lowercase":
		return lowercase, before * lowercaseGrowth, nil
	case "Prepend":
		// A text between two added tokens may have a single byte.
		return func(text string) string { return f.Prepend + text }, before + len(f.Prepend), nil
	case "Replace":
		return f.replace(before)
	}
	return nil, 0, unsupported("normalizer of type %q; supported are Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Prepend and Replace", f.Type)
}

func (f *fileNormalizer) replace(before int) (step normalizer, growth int, err error) {
	if f.Pattern != nil && f.Pattern.String != nil && *f.Pattern.String != "" {
		found := len(*f.Pattern.String)
		growth := before * ((max(found, len(f.Content)) + found - 1) / found)
		return func(text string) string { return strings.ReplaceAll(text, *f.Pattern.String, f.Content) }, growth, nil
	}
	if f.Pattern == nil || f.Pattern.Regex == nil {
		return nil, 0, unsupported("normalizer Replace without a pattern")
	}
	compiled, err := pattern.Compile(*f.Pattern.Regex)
	if err != nil {
		return nil, 0, unsupported("normalizer Replace: %w", err)
	}
	find := findPattern(compiled)
	return func(text string) string {
		var written strings.Builder
		for _, m := range find(nil, text, []span{{0, len(text)}}) {
			if m.found {
				written.WriteString(f.Content)
			} else {
				written.WriteString(text[m.start:m.end])
			}
		}
		return written.String()
	}, before * max(1, len(f.Content)), nil // a match has at least one byte
}

// nfc returns the canonical composition (NFC). Text with only characters below U+0300, the first combining character,
// is already composed.
func nfc(text string) string {
	const firstCombining = 0xcc // the first byte of U+0300
	for i := range len(text) {
		if text[i] >= firstCombining {
			return norm.NFC.String(text)
		}
	}
	return text
}

// lowercase maps each character independently of its context. Only the capital I with a dot has a lower case of two
// characters.
func lowercase(text string) string {
	return strings.ReplaceAll(strings.Map(func(r rune) rune {
		if r == 'İ' {
			return r
		}
		return unicode.ToLower(r)
	}, text), "İ", "i\u0307")
}
