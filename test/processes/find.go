// SPDX-License-Identifier: Apache-2.0

// Package processes starts programs that end with the process that started them. It also finds processes of this
// machine, for tests that kill or limit one process, so that a test never affects a similar process of another cluster.
package processes

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Find returns the ID of the only process for which is(ID, arguments) returns true. It returns 0 if
// there is no such process, and an error if there are several.
func Find(is func(number int, args []string) bool) (int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	found := 0
	for _, file := range files {
		number, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return 0, err
		}
		line, err := os.ReadFile(file) // the process may have ended since the listing
		if err != nil || len(line) == 0 || !is(number, strings.Split(string(bytes.TrimRight(line, "\x00")), "\x00")) {
			continue
		}
		if found != 0 {
			return 0, fmt.Errorf("processes %d and %d both match: %q", found, number, line)
		}
		found = number
	}
	return found, nil
}

// Below reports whether a process is a descendant of another. An orphaned process is a child of the first process of
// its PID namespace.
func Below(number, ancestor int) bool {
	for number > 1 {
		if number = parent(number); number == ancestor {
			return true
		}
	}
	return false
}

// parent returns the ID of a process's parent, or 0 if there is no parent or the process has ended.
func parent(number int) int {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", number))
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(status), "\nPPid:\t")
	line, _, _ := strings.Cut(after, "\n")
	above, _ := strconv.Atoi(line)
	return above
}

// InCgroup reports whether a process is in a cgroup with the name, or in a descendant of this cgroup.
func InCgroup(number int, name string) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", number))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(strings.TrimSpace(line)+"/", "/"+name+"/") {
			return true
		}
	}
	return false
}
