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

// begin runs a shell that waits, with an argument to be known by, and returns its number.
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
	mark := t.TempDir() // nobody else's
	has := func(_ int, args []string) bool { return slices.Contains(args, mark) }
	if number, err := Find(has); number != 0 || err != nil {
		t.Errorf("without any: %d, %v", number, err)
	}
	one := begin(t, mark)
	if number, err := Find(has); number != one || err != nil {
		t.Errorf("got %d, %v, want %d", number, err, one)
	}
	two := begin(t, mark)
	if number, err := Find(has); err == nil || !strings.Contains(err.Error(), strconv.Itoa(one)) || !strings.Contains(err.Error(), strconv.Itoa(two)) {
		t.Errorf("of two: %d, %v; want an error that names %d and %d", number, err, one, two)
	}
	second := func(number int, args []string) bool { return has(number, args) && number != one }
	if number, err := Find(second); number != two || err != nil {
		t.Errorf("got %d, %v, want %d", number, err, two)
	}
}

func TestBelow(t *testing.T) {
	us, child := os.Getpid(), begin(t, t.TempDir())
	for _, c := range []struct {
		what             string
		number, ancestor int
		want             bool
	}{
		{"a child", child, us, true},
		{"a grandchild", child, os.Getppid(), true},
		{"itself", us, us, false},
		{"a parent", us, child, false},
		{"one that is not there", 1 << 30, us, false},
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
			t.Errorf("in the cgroup %q: not told by its whole name", name)
		}
	}
	if InCgroup(os.Getpid(), "semmoe-nowhere") {
		t.Error("in a cgroup that is not there")
	}
}
