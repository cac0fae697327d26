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

func TestReadTables(t *testing.T) {
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		text string
		want map[string]string
		says string // empty if the file is valid
	}{
		"none":            {"{}", map[string]string{}, ""},
		"one":             {`{"` + a + `":"` + b + `"}`, map[string]string{a: b}, ""},
		"no JSON":         {`{`, nil, "tables.json: unexpected end"},
		"no object":       {`["` + a + `"]`, nil, "tables.json: json: cannot unmarshal array"},
		"no digest":       {`{"` + a + `":"../` + b[3:] + `"}`, nil, "tables.json: tables of plan " + a + `: digest "../`},
		"a short digest":  {`{"` + a[:16] + `":"` + b + `"}`, nil, `tables.json: plan: digest "` + a[:16]},
		"another version": {`{"` + a + `":{"tables":"` + b + `"}}`, nil, "cannot unmarshal object"},
	} {
		path := filepath.Join(dir, "tables.json")
		if err := os.WriteFile(path, []byte(tc.text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := readTables(path)
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if tc.says == "" && err != nil || tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)) {
			t.Errorf("%s: error %v, want one that contains %q", name, err, tc.says)
		}
	}
	if got, err := readTables(filepath.Join(dir, "absent")); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
}

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
