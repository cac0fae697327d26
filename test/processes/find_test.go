// SPDX-License-Identifier: Apache-2.0

package processes

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// begin runs a shell that waits, with an argument that identifies it, and returns its process ID.
func begin(t *testing.T, mark string) int {
	t.Helper()
	command := exec.Command("sh", "-c", "read -r _", mark)
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = command.Wait()
	})
	return command.Process.Pid
}

func TestFind(t *testing.T) {
	mark := t.TempDir() // unique to this test
	has := func(_ int, args []string) bool { return slices.Contains(args, mark) }
	if number, err := Find(has); number != 0 || err != nil {
		t.Errorf("without a matching process: got %d, %v, want 0", number, err)
	}
	one := begin(t, mark)
	if number, err := Find(has); number != one || err != nil {
		t.Errorf("got %d, %v, want %d", number, err, one)
	}
	two := begin(t, mark)
	if number, err := Find(has); err == nil || !strings.Contains(err.Error(), strconv.Itoa(one)) || !strings.Contains(err.Error(), strconv.Itoa(two)) {
		t.Errorf("with two matching processes: got %d, %v, want an error with %d and %d", number, err, one, two)
	}
	second := func(number int, args []string) bool { return has(number, args) && number != one }
	if number, err := Find(second); number != two || err != nil {
		t.Errorf("got %d, %v, want %d", number, err, two)
	}
}

func TestBelow(t *testing.T) {
	self, child := os.Getpid(), begin(t, t.TempDir())
	for _, c := range []struct {
		what             string
		number, ancestor int
		want             bool
	}{
		{"a child", child, self, true},
		{"a grandchild", child, os.Getppid(), true},
		{"itself", self, self, false},
		{"a parent", self, child, false},
		{"a process that does not exist", 1 << 30, self, false},
	} {
		if got := Below(c.number, c.ancestor); got != c.want {
			t.Errorf("%s: got %t", c.what, got)
		}
	}
}

func TestInCgroup(t *testing.T) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skip(err)
	}
	for line := range strings.Lines(string(text)) {
		name := filepath.Base(strings.TrimSpace(line))
		if name == "/" || !strings.Contains(line, "/"+name) {
			continue
		}
		if !InCgroup(os.Getpid(), name) || InCgroup(os.Getpid(), name+"0") || InCgroup(os.Getpid(), name[:len(name)-1]) {
			t.Errorf("cgroup %q: InCgroup does not match exactly the whole name", name)
		}
	}
	if InCgroup(os.Getpid(), "semmoe-nowhere") {
		t.Error("InCgroup reports true for a cgroup that does not exist")
	}
}
