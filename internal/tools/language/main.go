// SPDX-License-Identifier: Apache-2.0

// Command language checks the wording of comments and messages in the Go files of a repository. The vocabulary is in
// vocabulary.yaml.
//
//	go run ./language DIR
//
// It reads the files that git tracks below DIR, except generated files. It exits with code 1 and lists the files to
// change if comments exceed the limit of a group of words, or if a message contains a forbidden word.
package main

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

//go:embed vocabulary.yaml
var vocabularyText []byte

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: language DIR")
		os.Exit(2)
	}
	problems, err := run(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "language:", err)
		os.Exit(2)
	}
	for _, problem := range problems {
		fmt.Fprintln(os.Stderr, problem)
	}
	if len(problems) > 0 {
		os.Exit(1)
	}
}

// run returns the problems of the repository in a directory.
func run(dir string) ([]string, error) {
	v, err := parseVocabulary(vocabularyText)
	if err != nil {
		return nil, err
	}
	listed, err := exec.Command("git", "-C", dir, "ls-files", "-z", "--", "*.go").Output()
	if err != nil {
		return nil, fmt.Errorf("failed to list the files of %s: %w", dir, err)
	}
	c := newChecker(v)
	for _, name := range strings.Split(strings.TrimSuffix(string(listed), "\x00"), "\x00") {
		source, err := os.ReadFile(filepath.Join(dir, name))
		if os.IsNotExist(err) { // deleted, but not committed
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := c.add(name, source); err != nil {
			return nil, err
		}
	}
	return c.problems(), nil
}
