// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestWatchTables checks that each content of the file is reported once, including its removal. While the file is
// unreadable, the last content stays in effect.
func TestWatchTables(t *testing.T) {
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	path := filepath.Join(t.TempDir(), "tables.json")
	write := func(text string) {
		fresh := path + ".new"
		if err := os.WriteFile(fresh, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(fresh, path); err != nil {
			t.Fatal(err)
		}
	}
	set := make(chan map[string]string, 100)
	ctx, stop := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	write("{")
	ended.Go(func() { watchTables(ctx, path, time.Millisecond, func(tables map[string]string) { set <- tables }) })
	next := func(what string, want map[string]string) {
		t.Helper()
		select {
		case got := <-set:
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: nothing is said", what)
		}
	}
	one, other := map[string]string{a: b}, map[string]string{b: a}
	write(`{"` + a + `":"` + b + `"}`)
	next("one", one)
	write(` {"` + a + `": "` + b + `"}`) // unchanged content
	write("damaged")
	write(`{"` + b + `":"` + a + `"}`)
	next("another", other)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	next("none", nil)
	stop()
	ended.Wait()
	if len(set) > 0 {
		t.Errorf("besides %v is said", <-set)
	}
}
