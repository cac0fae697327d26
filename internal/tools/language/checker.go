// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"
)

// maxWorst is the maximum number of files that a report lists per group of words.
const maxWorst = 20

// vocabulary is the content of vocabulary.yaml.
type vocabulary struct {
	Comments []struct {
		Group            string   `yaml:"group"`
		PerThousandLines float64  `yaml:"perThousandLines"`
		Words            []string `yaml:"words"`
		Write            string   `yaml:"write"`
	} `yaml:"comments"`
	Messages []struct {
		Word  string `yaml:"word"`
		Write string `yaml:"write"`
	} `yaml:"messages"`
}

func parseVocabulary(text []byte) (*vocabulary, error) {
	v := &vocabulary{}
	decoder := yamlv3.NewDecoder(strings.NewReader(string(text)))
	decoder.KnownFields(true)
	if err := decoder.Decode(v); err != nil {
		return nil, fmt.Errorf("vocabulary.yaml: %w", err)
	}
	return v, nil
}

// pattern matches any of the words, case-insensitively, with any white space between the parts of a phrase.
func pattern(words ...string) *regexp.Regexp {
	var alternatives []string
	for _, word := range words {
		alternatives = append(alternatives, strings.Join(strings.Fields(regexp.QuoteMeta(word)), `\s+`))
	}
	return regexp.MustCompile(`(?i)\b(` + strings.Join(alternatives, "|") + `)\b`)
}

// checker counts words in comments and collects forbidden words in messages.
type checker struct {
	vocabulary *vocabulary
	groups     []*regexp.Regexp
	messages   []*regexp.Regexp

	lines int
	// counts holds, by group and file, the number of words.
	counts []map[string]int
	found  []string
}

func newChecker(v *vocabulary) *checker {
	c := &checker{vocabulary: v}
	for _, group := range v.Comments {
		c.groups = append(c.groups, pattern(group.Words...))
		c.counts = append(c.counts, map[string]int{})
	}
	for _, message := range v.Messages {
		c.messages = append(c.messages, pattern(message.Word))
	}
	return c
}

// add checks one Go file. Generated files are ignored. Messages of tests are not checked.
func (c *checker) add(name string, source []byte) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	if ast.IsGenerated(file) {
		return nil
	}
	for _, group := range file.Comments {
		text := group.Text() // without directives, such as //go:embed
		if text == "" {
			continue
		}
		c.lines += strings.Count(text, "\n")
		for i, words := range c.groups {
			if n := len(words.FindAllString(text, -1)); n > 0 {
				c.counts[i][name] += n
			}
		}
	}
	if !strings.HasSuffix(name, "_test.go") && !strings.HasPrefix(name, "test/") {
		ast.Inspect(file, func(node ast.Node) bool { return c.inspect(files, node) })
	}
	return nil
}

// inspect checks a string literal, and reports whether to inspect the children of a node. Import paths and struct tags
// are no messages.
func (c *checker) inspect(files *token.FileSet, node ast.Node) bool {
	switch node := node.(type) {
	case *ast.ImportSpec:
		return false
	case *ast.Field:
		if node.Tag != nil {
			ast.Inspect(node.Type, func(child ast.Node) bool { return c.inspect(files, child) })
			return false
		}
	case *ast.BasicLit:
		text, err := strconv.Unquote(node.Value)
		if node.Kind != token.STRING || err != nil || !strings.Contains(text, " ") {
			return true
		}
		for i, word := range c.messages {
			if word.MatchString(text) {
				m := c.vocabulary.Messages[i]
				c.found = append(c.found, fmt.Sprintf("%s: message with %q: write %s", files.Position(node.Pos()), m.Word, m.Write))
			}
		}
	}
	return true
}

// problems returns the exceeded limits with the worst files, and the messages with forbidden words.
func (c *checker) problems() []string {
	var problems []string
	for i, group := range c.vocabulary.Comments {
		total := 0
		var names []string
		for name, n := range c.counts[i] {
			total += n
			names = append(names, name)
		}
		rate := 1000 * float64(total) / float64(max(c.lines, 1))
		if rate <= group.PerThousandLines {
			continue
		}
		problems = append(problems, fmt.Sprintf("comments: group %q has %d words in %d lines, %.1f per 1,000 lines; the limit is %g. Write %s", group.Group, total, c.lines, rate,
			group.PerThousandLines, group.Write))
		slices.SortFunc(names, func(a, b string) int {
			return cmp.Or(cmp.Compare(c.counts[i][b], c.counts[i][a]), strings.Compare(a, b))
		})
		for _, name := range names[:min(maxWorst, len(names))] {
			problems = append(problems, fmt.Sprintf("  %4d  %s", c.counts[i][name], name))
		}
	}
	return append(problems, c.found...)
}
