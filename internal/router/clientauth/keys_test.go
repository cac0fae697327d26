// SPDX-License-Identifier: Apache-2.0

package clientauth

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
)

const aliceKey, bobKey = "alice-0123456789", "bob-0123456789abc"

// keysDir returns a directory with these keys, by name.
func keysDir(t testing.TB, keys map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range keys {
		write(t, filepath.Join(dir, name), content)
	}
	return dir
}

func write(t testing.TB, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAuthenticate(t *testing.T) {
	keys, err := Load(keysDir(t, map[string]string{"alice": aliceKey + "\n", "bob": bobKey, "..data": "of the kubelet"}))
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		header map[string]string
		client string
		err    error
	}{
		"bearer":              {map[string]string{"Authorization": "Bearer " + aliceKey}, "alice", nil},
		"lower case":          {map[string]string{"Authorization": "bearer  " + bobKey}, "bob", nil},
		"x-api-key":           {map[string]string{"X-Api-Key": bobKey}, "bob", nil},
		"none":                {nil, "", ErrMissing},
		"empty":               {map[string]string{"Authorization": "Bearer "}, "", ErrMissing},
		"basic":               {map[string]string{"Authorization": "Basic " + aliceKey}, "", ErrMissing},
		"wrong":               {map[string]string{"Authorization": "Bearer " + aliceKey + "x"}, "", ErrWrong},
		"prefix":              {map[string]string{"X-Api-Key": aliceKey[:15]}, "", ErrWrong},
		"wrong next to right": {map[string]string{"Authorization": "Bearer wrong", "X-Api-Key": aliceKey}, "", ErrWrong},
	} {
		t.Run(name, func(t *testing.T) {
			header := http.Header{"Accept": {"a"}}
			for key, value := range tc.header {
				header.Set(key, value)
			}
			client, err := keys.Authenticate(header)
			if client != tc.client || !errors.Is(err, tc.err) {
				t.Errorf("client %q, error %v; want %q, %v", client, err, tc.client, tc.err)
			}
			if len(header) != 1 {
				t.Errorf("the header still contains a key: %v", header)
			}
		})
	}
}

func TestRejectsInvalidKeys(t *testing.T) {
	for name, tc := range map[string]struct {
		keys map[string]string
		want string
	}{
		"no key":      {nil, "contains no API key"},
		"short":       {map[string]string{"a": "secret"}, `the key in "`},
		"with spaces": {map[string]string{"a": "secret secret secret"}, "printable ASCII characters without spaces"},
		"control":     {map[string]string{"a": "secret\x00secretsecret"}, "printable ASCII"},
		"large":       {map[string]string{"a": strings.Repeat("s", maxKeyBytes+1)}, "too large"},
		"name":        {map[string]string{"a b": aliceKey}, "letters, digits and ._- are allowed"},
		"twice":       {map[string]string{"a": aliceKey, "b": aliceKey + " "}, "has the same key"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Load(keysDir(t, tc.keys))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want %q", err, tc.want)
			}
			if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), aliceKey) {
				t.Errorf("the error contains a key: %v", err)
			}
		})
	}
	many := map[string]string{}
	for i := range maxKeys + 1 {
		many[fmt.Sprint(i)] = fmt.Sprintf("%016d", i)
	}
	if _, err := Load(keysDir(t, many)); err == nil || !strings.Contains(err.Error(), "at most 1024 are allowed") {
		t.Errorf("error %v", err)
	}
}

// TestFollowsTheDirectory replaces a key, and then makes the directory invalid.
func TestFollowsTheDirectory(t *testing.T) {
	dir := keysDir(t, map[string]string{"alice": aliceKey})
	keys, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	var logged atomic.Value
	logged.Store("")
	ctx, stop := context.WithCancel(logr.NewContext(t.Context(), funcr.New(func(_, args string) { logged.Store(logged.Load().(string) + args) }, funcr.Options{})))
	ended := make(chan struct{})
	go func() { defer close(ended); keys.watch(ctx, time.Millisecond) }()
	defer func() { stop(); <-ended }()
	eventually := func(what string, holds func() bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !holds(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not within 10 s: %s; log %s", what, logged.Load())
			}
		}
	}
	valid := func(key string) bool {
		_, err := keys.Authenticate(http.Header{"X-Api-Key": {key}})
		return err == nil
	}
	next := filepath.Join(t.TempDir(), "next")
	write(t, next, bobKey)
	if err := os.Rename(next, filepath.Join(dir, "alice")); err != nil {
		t.Fatal(err)
	}
	eventually("the new key is valid", func() bool { return valid(bobKey) })
	if valid(aliceKey) {
		t.Error("the replaced key is still valid")
	}
	if err := os.Remove(filepath.Join(dir, "alice")); err != nil {
		t.Fatal(err)
	}
	eventually("the empty directory is logged", func() bool { return strings.Contains(logged.Load().(string), "keeping the keys in use") })
	if !valid(bobKey) {
		t.Error("an empty directory locks out every client")
	}
	if text := logged.Load().(string); strings.Contains(text, aliceKey) || strings.Contains(text, bobKey) {
		t.Errorf("the log contains a key: %s", text)
	}
}

func BenchmarkAuthenticate(b *testing.B) {
	keys, err := Load(keysDir(b, map[string]string{"alice": aliceKey, "bob": bobKey}))
	if err != nil {
		b.Fatal(err)
	}
	header := http.Header{}
	b.ReportAllocs()
	for b.Loop() {
		header.Set("Authorization", "Bearer "+bobKey)
		if _, err := keys.Authenticate(header); err != nil {
			b.Fatal(err)
		}
	}
}
