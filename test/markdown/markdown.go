// SPDX-License-Identifier: Apache-2.0

// Package markdown parses documents for the tests of the documentation: blocks of code with their marks, spans of code,
// links, and the anchors of headings. It supports only the Markdown syntax that the documentation uses.
package markdown

import (
	"regexp"
	"strings"
	"unicode"
)

// Block is a fenced block.
type Block struct {
	// Line is the number of the first line inside the fence.
	Line int
	// Language is the info string after the opening fence.
	Language string
	// Mark is the comment in the line before the fence, without its delimiters; empty if there is none.
	Mark string
	// Text is the content, without the indentation of a list item.
	Text string
}

// Link is an inline link.
type Link struct {
	Line   int
	Target string
}

var (
	comment = regexp.MustCompile(`^<!-- (.*) -->$`)
	inline  = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	span    = regexp.MustCompile("`([^`]+)`")
	linked  = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// Blocks returns the fenced blocks of a document.
func Blocks(document string) []Block {
	var blocks []Block
	var open *Block
	before, indent := "", ""
	for i, line := range strings.Split(document, "\n") {
		bare := strings.TrimSpace(line)
		switch {
		case open == nil && strings.HasPrefix(bare, "```"):
			indent = line[:strings.Index(line, "`")]
			open = &Block{Line: i + 2, Language: strings.TrimPrefix(bare, "```")}
			if match := comment.FindStringSubmatch(before); match != nil {
				open.Mark = match[1]
			}
		case open != nil && bare == "```":
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.Text += strings.TrimPrefix(line, indent) + "\n"
		}
		before = bare
	}
	return blocks
}

// prose returns the lines of a document with empty lines in place of blocks of code, so that line numbers do not
// change.
func prose(document string) []string {
	lines := strings.Split(document, "\n")
	for _, block := range Blocks(document) {
		for i := range strings.Count(block.Text, "\n") {
			lines[block.Line-1+i] = ""
		}
	}
	return lines
}

// Links returns the inline links of a document outside of code.
func Links(document string) []Link {
	var links []Link
	for i, line := range prose(document) {
		for _, match := range inline.FindAllStringSubmatch(span.ReplaceAllString(line, "code"), -1) {
			links = append(links, Link{i + 1, match[1]})
		}
	}
	return links
}

// Spans returns the spans of code of a document that do not continue in the next line.
func Spans(document string) []string {
	var spans []string
	for _, line := range prose(document) {
		for _, match := range span.FindAllStringSubmatch(line, -1) {
			spans = append(spans, match[1])
		}
	}
	return spans
}

// Anchors returns the anchors of the headings of a document, as GitHub generates them.
func Anchors(document string) map[string]bool {
	anchors := map[string]bool{}
	for _, line := range prose(document) {
		marks, title, ok := strings.Cut(line, " ")
		if !ok || marks == "" || strings.Trim(marks, "#") != "" {
			continue
		}
		anchors[anchor(title)] = true
	}
	return anchors
}

// anchor returns the anchor of a heading: lower case, hyphens for spaces, and no punctuation.
func anchor(title string) string {
	title = linked.ReplaceAllString(title, "$1")
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, strings.TrimSpace(title))
}
