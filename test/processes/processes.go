// Package processes finds processes of this machine for tests that kill or limit one: the one that is meant, and never another
// cluster's that looks the same.
package processes

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Find returns the number of the one process that is accepted by its number and its arguments; 0 where there is none. It is an
// error that there are several.
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
		line, err := os.ReadFile(file) // a process may have ended meanwhile
		if err != nil || len(line) == 0 || !is(number, strings.Split(string(bytes.TrimRight(line, "\x00")), "\x00")) {
			continue
		}
		if found != 0 {
			return 0, fmt.Errorf("processes %d and %d look the same: %q", found, number, line)
		}
		found = number
	}
	return found, nil
}

// Below tells whether a process is a child of another, or of one below it. What has lost its parent is below the first process of
// its pid namespace.
func Below(number, ancestor int) bool {
	for number > 1 {
		if number = parent(number); number == ancestor {
			return true
		}
	}
	return false
}

// parent is the number of a process's parent; 0 where there is none, or the process has ended.
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

// InCgroup tells whether a process is in a cgroup of that name, or in one below it.
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
