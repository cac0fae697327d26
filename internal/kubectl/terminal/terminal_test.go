// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bytes"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestOf(t *testing.T) {
	for name, test := range map[string]struct {
		env  map[string]string
		want Style
	}{
		"pipe":             {nil, Style{}},
		"pipe with a size": {map[string]string{"COLUMNS": "100"}, Style{Width: 100}},
		"too narrow":       {map[string]string{"COLUMNS": "3"}, Style{Width: minWidth}},
		"not a number":     {map[string]string{"COLUMNS": "wide"}, Style{}},
	} {
		if got := Of(&bytes.Buffer{}, func(name string) string { return test.env[name] }); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

var escapes = regexp.MustCompile("\x1b\\[[0-9]*m")

// lines returns the visible lines of a text.
func lines(text string) []string {
	return strings.Split(strings.TrimSuffix(escapes.ReplaceAllString(text, ""), "\n"), "\n")
}

// words returns a text without colors, tree characters and white space.
func words(text string) string {
	return strings.NewReplacer("│", "", "├─", "", "└─", "", " ", "", "\n", "").Replace(escapes.ReplaceAllString(text, ""))
}

func sentence(random *rand.Rand, maxWords int) string {
	var all []string
	for range 1 + random.IntN(maxWords) {
		all = append(all, strings.Repeat(string(rune('a'+random.IntN(26))), 1+random.IntN(12))+strings.Repeat("µ", random.IntN(2)))
	}
	return strings.Join(all, " ")
}

// TestWrapping verifies on random texts that no line is wider than the terminal, that no word is lost, and that colors
// do not change the text.
func TestWrapping(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		width := minWidth + random.IntN(80)
		root := &Node{Text: Text{{sentence(random, 4), Strong}, {" " + sentence(random, 20), Plain}}}
		child := root.Add(Words(sentence(random, 30), Good))
		child.Add(Text{{sentence(random, 3), Bad}, {", " + sentence(random, 3), Faint}})
		root.Add(Words(sentence(random, 5), Plain))
		bound, free := Style{Width: width}.Tree(root), Style{}.Tree(root)
		colored := Style{Width: width, Color: true}.Tree(root)
		if escapes.ReplaceAllString(colored, "") != bound {
			t.Fatalf("colors change the text:\n%s\n%s", colored, bound)
		}
		if words(bound) != words(free) {
			t.Fatalf("width %d: lost words:\n%s\n%s", width, bound, free)
		}
		if len(lines(free)) != 4 {
			t.Fatalf("%d lines without a width, want 4", len(lines(free)))
		}
		rows := [][]Cell{
			{{"Ready", Plain}, {"True", Good}, {sentence(random, 12), Plain}},
			{{"Progressing", Plain}, {"False", Bad}, {sentence(random, 3), Plain}},
		}
		header := []string{"TYPE", "STATUS", "MESSAGE"}
		drawn := Style{Width: width, Color: true}.Table(header, rows)
		for _, row := range rows {
			if !strings.Contains(words(drawn), words(row[2].Text)) {
				t.Fatalf("width %d: lost %q:\n%s", width, row[2].Text, drawn)
			}
		}
		for _, line := range append(lines(drawn), lines(bound)...) {
			if utf8.RuneCountInString(line) > width {
				t.Fatalf("%d columns in a terminal of %d: %q", utf8.RuneCountInString(line), width, line)
			}
		}
	}
}

func TestTable(t *testing.T) {
	header := []string{"TYPE", "STATUS", "MESSAGE"}
	rows := [][]Cell{{{"Ready", Plain}, {"True", Good}, {"2 of 2 replicas serve the model now", Plain}}}
	for width, want := range map[int]string{
		0:  "TYPE   STATUS  MESSAGE\nReady  True    2 of 2 replicas serve the model now\n",
		50: "TYPE   STATUS  MESSAGE\nReady  True    2 of 2 replicas serve the model now\n",
		40: "TYPE   STATUS\nReady  True\n    2 of 2 replicas serve the model now\n",
		10: "Ready\n  STATUS:\n  True\n  MESSAGE:\n  2 of 2\n  replicas\n  serve\n  the\n  model\n  now\n",
	} {
		if got := (Style{Width: width}).Table(header, rows); got != want {
			t.Errorf("width %d:\n%s\nwant\n%s", width, got, want)
		}
	}
	bars, drawn := []string{"RANK", "LOAD", ""}, [][]Cell{{{"0", Plain}, {"54.0%", Plain}, {strings.Repeat("█", 20), Plain}}}
	if got, want := (Style{Width: 20}).Table(bars, drawn), "RANK  LOAD\n0     54.0%\n"; got != want {
		t.Errorf("a last column without a name:\n%s\nwant\n%s", got, want)
	}
	if got, want := (Style{Color: true}).Table(header, rows), "\x1b[2mTYPE\x1b[0m   \x1b[2mSTATUS\x1b[0m  \x1b[2mMESSAGE\x1b[0m\nReady  \x1b[32mTrue\x1b[0m    2 of 2 replicas serve the model now\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestTree(t *testing.T) {
	root := &Node{Text: Text{{"MoEDeployment", Faint}, {" llm/qwen", Strong}}}
	plan := root.Add(Words("PlacementPlan qwen-1: it promises 42.6%", Plain))
	plan.Add(Words("ConfigMap", Plain))
	root.Add(Words("Pod qwen-0", Plain))
	want := `MoEDeployment llm/qwen
├─ PlacementPlan qwen-1: it
│  │   promises 42.6%
│  └─ ConfigMap
└─ Pod qwen-0
`
	if got := (Style{Width: 30}).Tree(root); got != want {
		t.Errorf("\n%s\nwant\n%s", got, want)
	}
}
