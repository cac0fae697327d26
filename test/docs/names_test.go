// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/test/markdown"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

// ours is the URL prefix of the project's documents.
const ours = "https://github.com/semmoe/operator/blob/main/"

// TestLinks checks that every link within the project leads to an existing file, and to an existing heading.
func TestLinks(t *testing.T) {
	all, followed := documents(t), 0
	for from, text := range all {
		for _, link := range markdown.Links(text) {
			target, absolute := strings.CutPrefix(link.Target, ours)
			if !absolute && strings.Contains(target, "://") {
				continue
			}
			followed++
			file, anchor, _ := strings.Cut(target, "#")
			switch {
			case file == "":
				file = from
			case !absolute:
				file = path.Join(path.Dir(from), file)
			}
			if _, err := os.Stat(filepath.Join(repository, filepath.FromSlash(file))); err != nil {
				t.Errorf("%s, line %d: the target of link %s does not exist: %v", from, link.Line, link.Target, err)
			} else if anchor != "" && !markdown.Anchors(all[file])[anchor] {
				t.Errorf("%s, line %d: %s has no heading %s", from, link.Line, file, anchor)
			}
		}
	}
	if followed < 100 {
		t.Errorf("found only %d links", followed)
	}
}

var (
	metric     = regexp.MustCompile(`\bsemmoe_[a-z_]*[a-z]\b`)
	documented = regexp.MustCompile("(?m)^\\| `(semmoe_[a-z_]+)` \\| ([a-z]+) \\|")
	// ofEngines are the metrics of engines, which docs/token-shuffle.md describes.
	ofEngines = []string{"semmoe_engine_activations_total", "semmoe_engine_tables_info", "semmoe_engine_tables_refused"}
)

// TestMetrics checks that the documents name only metrics in docs/metrics.md. The tests of the collectors check that
// these metrics are exported.
func TestMetrics(t *testing.T) {
	all := documents(t)
	known := map[string]bool{}
	for _, name := range ofEngines {
		known[name] = true
	}
	for _, match := range documented.FindAllStringSubmatch(all["docs/metrics.md"], -1) {
		known[match[1]] = true
		if match[2] == "histogram" {
			known[match[1]+"_bucket"], known[match[1]+"_count"], known[match[1]+"_sum"] = true, true, true
		}
	}
	if len(known) < 40 {
		t.Fatalf("docs/metrics.md has only %d metrics", len(known))
	}
	for file, text := range all {
		for _, name := range metric.FindAllString(text, -1) {
			if !known[name] {
				t.Errorf("%s names the metric %s, which docs/metrics.md does not have", file, name)
			}
		}
	}
}

var (
	command = regexp.MustCompile(`(?:^|[\s(])(semmoe|semmoe-lab) ([a-z]+)((?:\s+[^|;&\n]+)?)`)
	// engine matches the command line of a program without commands.
	engine = regexp.MustCompile(`(?:^|[\s(])semmoe-refengine((?:\s+[^|;&\n]+)?)`)
	flag   = regexp.MustCompile(`(?:^|\s)--([a-z][a-z0-9-]*)`)
)

// TestFlags checks that the semmoe commands in the documents, and their flags, exist.
func TestFlags(t *testing.T) {
	texts := map[string]string{} // by command line
	help := func(program string, command ...string) string {
		line := strings.Join(append([]string{program}, command...), " ")
		if texts[line] == "" {
			path, err := programs.Built(program)
			tier.Require(t, err)
			text, err := programs.Run(path, nil, "", append(command, "--help")...)
			if err != nil {
				t.Fatal(err)
			}
			texts[line] = text
		}
		return texts[line]
	}
	tried := 0
	checkFlags := func(file, line, command, text, flags string) {
		for _, given := range flag.FindAllStringSubmatch(flags, -1) {
			tried++
			if !regexp.MustCompile(`--` + given[1] + `\b`).MatchString(text) {
				t.Errorf("%s: %s has no flag --%s: %s", file, command, given[1], line)
			}
		}
	}
	for file, text := range documents(t) {
		var shown []string
		for _, block := range markdown.Blocks(text) {
			if block.Language == "sh" {
				shown = append(shown, strings.Split(strings.ReplaceAll(block.Text, "\\\n", " "), "\n")...)
			}
		}
		for _, line := range append(shown, markdown.Spans(text)...) {
			line, _, _ = strings.Cut(strings.ReplaceAll(line, "kubectl semmoe", "kubectl-semmoe"), " #")
			for _, match := range command.FindAllStringSubmatch(line, -1) {
				program, name := match[1], match[2]
				if !regexp.MustCompile(`(?m)^  ` + name + ` `).MatchString(help(program)) {
					if !strings.HasPrefix(strings.TrimSpace(line), "helm ") { // semmoe is the name of a release there
						t.Errorf("%s: command %s %s does not exist: %s", file, program, name, line)
					}
					continue
				}
				commands := []string{name}
				if sub, _, _ := strings.Cut(strings.TrimSpace(match[3]), " "); regexp.MustCompile(`^[a-z]+$`).MatchString(sub) &&
					regexp.MustCompile(`(?m)^  `+sub+` `).MatchString(help(program, name)) {
					commands = append(commands, sub)
				}
				checkFlags(file, line, program+" "+strings.Join(commands, " "), help(program, commands...), match[3])
			}
			for _, match := range engine.FindAllStringSubmatch(line, -1) {
				checkFlags(file, line, "semmoe-refengine", help("semmoe-refengine"), match[1])
			}
		}
	}
	if tried < 40 {
		t.Errorf("found only %d flags", tried)
	}
}

var target = regexp.MustCompile(`\bmake ([a-z][a-z0-9-]*)`)

// TestTargets checks that every Makefile target in code spans and blocks exists.
func TestTargets(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(repository, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	var known []string
	for _, match := range regexp.MustCompile(`(?m)^\.PHONY: (.*)$`).FindAllStringSubmatch(string(makefile), -1) {
		known = append(known, strings.Fields(match[1])...)
	}
	for file, text := range documents(t) {
		code := markdown.Spans(text)
		for _, block := range markdown.Blocks(text) {
			if block.Language == "sh" {
				code = append(code, block.Text)
			}
		}
		for _, span := range code {
			for _, match := range target.FindAllStringSubmatch(span, -1) {
				if !slices.Contains(known, match[1]) {
					t.Errorf("%s: the Makefile has no target %s", file, match[1])
				}
			}
		}
	}
}

// notFuzzed are packages with fuzz targets that make fuzz-short leaves out: they parse nothing that clients, engines,
// checkpoints or users send.
var notFuzzed = []string{
	"internal/kube/printable", "internal/tools/image", "solver/cost", "test/corpus", "test/localcluster/internal/node",
}

// TestParsersAreFuzzed checks that the check of each commit fuzzes every package with fuzz targets, and scans for known
// vulnerabilities.
func TestParsersAreFuzzed(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(repository, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	_, list, found := strings.Cut(strings.ReplaceAll(string(makefile), "\\\n", " "), "\nFUZZED := ")
	list, _, _ = strings.Cut(list, "\n")
	known, with := append(strings.Fields(list), notFuzzed...), map[string]bool{}
	err = filepath.WalkDir(repository, func(file string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "bin" || entry.Name() == ".git"):
			return fs.SkipDir
		case entry.IsDir() || !strings.HasSuffix(file, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(file)
		if strings.Contains(string(text), "\nfunc Fuzz") {
			below, _ := filepath.Rel(repository, filepath.Dir(file)) // both are relative
			with[filepath.ToSlash(below)] = true
		}
		return err
	})
	if err != nil || !found || len(with) < 20 {
		t.Fatalf("%d packages with fuzz targets, FUZZED found: %t, %v", len(with), found, err)
	}
	for name := range with {
		if !slices.Contains(known, name) {
			t.Errorf("make fuzz-short leaves out %s: add it to FUZZED", name)
		}
	}
	for _, name := range known {
		if !with[name] {
			t.Errorf("%s has no fuzz target", name)
		}
	}
	check, err := os.ReadFile(filepath.Join(repository, ".ci", "run"))
	if err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"make fuzz-short", "make vulncheck"} {
		if !strings.Contains(string(check), command) {
			t.Errorf(".ci/run does not run %s", command)
		}
	}
}
