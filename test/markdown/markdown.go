// Package markdown takes apart what the documentation consists of, for the tests that try it: blocks of code with their marks, spans of
// code, links, and the anchors of headings. It knows what the documentation uses, and no more of Markdown.
package markdown

import (
	"regexp"
	"strings"
	"unicode"
)

// Block is a fenced block.
type Block struct {
	// Line is the number of its first line inside.
	Line int
	// Language is what stands behind the opening fence.
	Language string
	// Mark is the comment in the line before the fence, without its brackets; empty for none.
	Mark string
	// Text has no indentation of its list item.
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

// Blocks are the fenced blocks of a document.
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

// prose is a document with its blocks of code empty, so that lines keep their numbers.
func prose(document string) []string {
	lines := strings.Split(document, "\n")
	for _, block := range Blocks(document) {
		for i := range strings.Count(block.Text, "\n") {
			lines[block.Line-1+i] = ""
		}
	}
	return lines
}

// Links are the inline links of a document outside of code.
func Links(document string) []Link {
	var links []Link
	for i, line := range prose(document) {
		for _, match := range inline.FindAllStringSubmatch(span.ReplaceAllString(line, "code"), -1) {
			links = append(links, Link{i + 1, match[1]})
		}
	}
	return links
}

// Spans are the spans of code of a document that end in their line.
func Spans(document string) []string {
	var spans []string
	for _, line := range prose(document) {
		for _, match := range span.FindAllStringSubmatch(line, -1) {
			spans = append(spans, match[1])
		}
	}
	return spans
}

// Anchors are what links may lead to in a document: its headings, as GitHub names them.
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

// anchor is the name of a heading: lower case, hyphens for spaces, and nothing of punctuation.
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
