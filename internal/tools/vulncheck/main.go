// SPDX-License-Identifier: Apache-2.0

// Command vulncheck runs govulncheck on binaries with a pinned vulnerability database. It fails if a binary contains a
// vulnerable symbol of a module. Vulnerabilities of the standard library depend on the Go version of the build. They
// are printed and are no failure. Without access to the module proxy the command prints a message and succeeds.
// Binaries must have their symbol tables.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: vulncheck DATABASE-DIR BINARY...")
		os.Exit(2)
	}
	switch found, err := check(os.Args[1], os.Args[2:]); {
	case errors.Is(err, errDownload):
		fmt.Println("SKIPPED:", err)
	case err != nil:
		fmt.Fprintln(os.Stderr, "vulncheck:", err)
		os.Exit(1)
	case found:
		os.Exit(1)
	}
}

// finding is a message of govulncheck with a vulnerability and its location. Function is empty if the binary does not
// contain the vulnerable part of the module or package.
type finding struct {
	OSV          string `json:"osv"`
	FixedVersion string `json:"fixed_version"`
	Trace        []struct {
		Module, Version, Function string
	} `json:"trace"`
}

// check prints the findings in binaries, and reports whether a module must be upgraded.
func check(database string, binaries []string) (found bool, err error) {
	if database, err = filepath.Abs(database); err != nil {
		return false, err
	}
	if err := writeDatabase(database); err != nil {
		return false, err
	}
	lines := map[string]bool{}
	for _, binary := range binaries {
		command := exec.Command("go", "tool", "govulncheck", "-db", "file://"+database, "-mode", "binary", "-format", "json", binary)
		command.Stderr = os.Stderr
		output, err := command.Output()
		if err != nil {
			return false, fmt.Errorf("govulncheck %s: %w", binary, err)
		}
		findings, err := parse(output)
		if err != nil {
			return false, fmt.Errorf("govulncheck %s: %w", binary, err)
		}
		for _, f := range findings {
			at := f.Trace[0]
			if at.Module != "stdlib" {
				found = true
			}
			lines[fmt.Sprintf("%s: %s %s is vulnerable; fixed in %s (https://pkg.go.dev/vuln/%[1]s)", f.OSV, at.Module, at.Version, f.FixedVersion)] = true
		}
	}
	for _, line := range slices.Sorted(maps.Keys(lines)) {
		fmt.Println(line)
	}
	return found, nil
}

// parse returns the findings of vulnerable symbols in a stream of messages.
func parse(output []byte) ([]finding, error) {
	var list []finding
	for decoder := json.NewDecoder(bytes.NewReader(output)); ; {
		var message struct{ Finding *finding }
		err := decoder.Decode(&message)
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		if f := message.Finding; f != nil && len(f.Trace) > 0 && f.Trace[0].Function != "" {
			list = append(list, *f)
		}
	}
}
