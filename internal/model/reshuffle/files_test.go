// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// closed is a directory with one file that only its owner can open. File modes are not enough, because tests may run as
// root.
type closed struct {
	fs.FS
	name string
}

func (c closed) Open(name string) (fs.File, error) {
	if name == c.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return c.FS.Open(name)
}

// Stat succeeds on a file that cannot be opened, as on a real system.
func (c closed) Stat(name string) (fs.FileInfo, error) { return fs.Stat(c.FS, name) }

// TestUnreadableFilesOfOtherUsers checks that a directory that cannot be read is left out, such as the lost+found of a volume, and that
// a file that cannot be read is an error.
func TestUnreadableFilesOfOtherUsers(t *testing.T) {
	c, m := reversed(t)
	for _, name := range []string{"lost+found/#12", "README.md", "sub/vocabulary.txt", "hf_quant_config.json"} {
		writeFile(t, filepath.Join(c.Dir, name), []byte("{}"))
	}
	for _, name := range []string{"lost+found", "sub"} {
		files, err := findFiles(t.Context(), closed{os.DirFS(c.Dir), name}, c, m)
		if err != nil || !slices.Equal(files.leftOut, []string{name}) || !slices.Contains(files.copied, "README.md") {
			t.Errorf("%s: %+v, %v", name, files, err)
		}
	}
	for name, path := range map[string]string{".": c.Dir, "README.md": "README.md", "sub/vocabulary.txt": "sub/vocabulary.txt", "hf_quant_config.json": "hf_quant_config.json"} {
		_, err := findFiles(t.Context(), closed{os.DirFS(c.Dir), name}, c, m)
		if !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), path+" is not readable by this user") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestModelVolumeHoldsOutputs checks that outputs on the model's volume, and the files next to them, are not treated as
// files of the model, at any depth, even if one vanishes during the walk.
func TestModelVolumeHoldsOutputs(t *testing.T) {
	c, m := reversed(t)
	for _, name := range []string{"", "cache/"} {
		for _, file := range []string{"KEY/" + manifestFile, "KEY/tokenizer.json", "KEY/sub/vocabulary.txt", "old/" + manifestFile, "old/x.safetensors",
			".NEW.0123456789abcdef.partial/tokenizer.json", ".KEY.used", ".NEW.lock", ".NEW.used", ".NEW.probe-123", admissionLock} {
			writeFile(t, filepath.Join(c.Dir, name+file), []byte("{}"))
		}
	}
	own := []string{"sub/vocabulary.txt", "tokenizer.json", ".gitattributes", "poetry.lock", "x.used"}
	// The model may be an output itself.
	for _, file := range append([]string{manifestFile}, own...) {
		writeFile(t, filepath.Join(c.Dir, file), []byte("{}"))
	}
	if err := os.Mkdir(filepath.Join(c.Dir, "vanishing"), 0o755); err != nil {
		t.Fatal(err)
	}
	files, err := findFiles(t.Context(), vanishing{os.DirFS(c.Dir), "vanishing"}, c, m)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files.copied)
	slices.Sort(own)
	if !slices.Equal(files.copied, own) || len(files.leftOut) > 0 {
		t.Errorf("copied %q, left out %q", files.copied, files.leftOut)
	}
}

// vanishing is a directory with one file that is listed but no longer exists when it is opened.
type vanishing struct {
	fs.FS
	name string
}

func (v vanishing) Open(name string) (fs.File, error) {
	if name == v.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return v.FS.Open(name)
}

func (v vanishing) Stat(name string) (fs.FileInfo, error) { return fs.Stat(v.FS, name) }
