// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// kimi is a checkpoint in the format of Kimi-K2, and the ids of the library tiktoken for texts.
type kimi struct {
	Model  string
	Config map[string]any
	Texts  []string
	IDs    [][]int32
}

func readKimi(t *testing.T) *kimi {
	t.Helper()
	var k kimi
	readGolden(t, "kimi", &k)
	return &k
}

// write writes the files of a checkpoint to a new directory.
func (k *kimi) write(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	config, err := json.Marshal(k.Config)
	if err := errors.Join(err, os.WriteFile(filepath.Join(dir, tiktokenFile), []byte(k.Model), 0o600),
		os.WriteFile(filepath.Join(dir, configFile), config, 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestTiktokenMatchesReference(t *testing.T) {
	k := readKimi(t)
	tok, err := LoadCheckpoint(k.write(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(k.Texts) < 300 || len(k.IDs) != len(k.Texts) {
		t.Fatalf("got ids of %d texts, want %d", len(k.IDs), len(k.Texts))
	}
	for i, text := range k.Texts {
		got := tok.Encode(text)
		if !slices.Equal(got, k.IDs[i]) {
			t.Errorf("%q: %q, want %q", text, spell(tok, got), spell(tok, k.IDs[i]))
		}
		if back := string(tok.DecodeBytes(got, false)); back != text {
			t.Errorf("%q decodes to %q", text, back)
		}
	}
	base := int32(strings.Count(k.Model, "\n"))
	if tok.VocabSize() != int(base)+258 || !tok.IsSpecial(base) || tok.IsSpecial(base+4) || !tok.IsSpecial(base+9) {
		t.Errorf("%d tokens; special are [BOS] %v, <think> %v, reserved %v", tok.VocabSize(), tok.IsSpecial(base), tok.IsSpecial(base+4), tok.IsSpecial(base+9))
	}
}

func TestTokenizerJSONComesFirst(t *testing.T) {
	dir := readKimi(t).write(t)
	want := readFamily(t, "gpt2").file
	if err := os.WriteFile(filepath.Join(dir, tokenizerFile), want, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := FromCheckpoint(dir); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v; want the %d of tokenizer.json", len(got), err, len(want))
	}
}

func TestFromCheckpointRefuses(t *testing.T) {
	code := "num_reserved_special_tokens = 256\n" + strings.Join(kimiPatterns, "\n")
	for name, test := range map[string]struct {
		change func(k *kimi, dir string) error
		want   string
	}{
		"nothing wrong": {func(*kimi, string) error { return nil }, ""},
		"known code": {func(_ *kimi, dir string) error {
			return os.WriteFile(filepath.Join(dir, "tokenization_kimi.py"), []byte(code), 0o600)
		}, ""},
		"another expression": {func(_ *kimi, dir string) error {
			return os.WriteFile(filepath.Join(dir, "tokenization_kimi.py"), []byte(strings.Replace(code, "{1,3}", "{1,2}", 1)), 0o600)
		}, `tokenization_kimi.py does not contain "\\p{N}{1,3}"`},
		"more reserved tokens": {func(_ *kimi, dir string) error {
			return os.WriteFile(filepath.Join(dir, "tokenization_kimi.py"), []byte(strings.Replace(code, "256", "512", 1)), 0o600)
		}, "only the code of Kimi-K2 is supported"},
		"another class": {func(k *kimi, _ string) error { k.Config["tokenizer_class"] = "QWenTokenizer"; return nil }, `tokenizer_class "QWenTokenizer"`},
		"no added tokens": {func(k *kimi, _ string) error { delete(k.Config, "added_tokens_decoder"); return nil },
			"without added_tokens_decoder"},
		"odd added token": {func(k *kimi, _ string) error {
			k.Config["added_tokens_decoder"] = map[string]any{"x": map[string]any{"content": "y"}}
			return nil
		}, `added_tokens_decoder: "x": "y" is invalid`},
		"no base64":     {func(k *kimi, _ string) error { k.Model = "!" + k.Model; return nil }, "line 1: "},
		"no rank":       {func(k *kimi, _ string) error { k.Model += "IQ==\n"; return nil }, `rank "" is invalid`},
		"huge rank":     {func(k *kimi, _ string) error { k.Model += "enp6eg== 99999999999\n"; return nil }, `rank "99999999999" is invalid`},
		"gap in ranks":  {func(k *kimi, _ string) error { k.Model += "enp6eg== 16000000\n"; return nil }, "rank 16000000 is invalid"},
		"two ranks":     {func(k *kimi, _ string) error { k.Model += "YQ== 5\n"; return nil }, `token "a" has two ranks`},
		"missing bytes": {func(k *kimi, _ string) error { k.Model = "YQ== 0\n"; return nil }, "no token for byte"},
		"long token": {func(k *kimi, _ string) error {
			k.Model += strings.Repeat("enp6", 400) + " " + "1204\n"
			return nil
		}, "has more than 512 bytes"},
		"git-lfs pointer": {func(k *kimi, _ string) error {
			k.Model = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
			return nil
		}, "is a Git LFS pointer"},
		"HTML page": {func(_ *kimi, dir string) error {
			return os.WriteFile(filepath.Join(dir, tokenizerFile), []byte("<!DOCTYPE html><html>"), 0o600)
		}, "is an HTML page"},
		"named pipe": {func(_ *kimi, dir string) error {
			return syscall.Mkfifo(filepath.Join(dir, tokenizerFile), 0o600)
		}, "is a named pipe, not a regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			k := readKimi(t)
			dir := t.TempDir()
			if err := test.change(k, dir); err != nil {
				t.Fatal(err)
			}
			if err := os.CopyFS(dir, os.DirFS(k.write(t))); err != nil {
				t.Fatal(err)
			}
			if _, err := LoadCheckpoint(dir); (test.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
	if _, err := FromCheckpoint(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty directory: %v", err)
	}
}
