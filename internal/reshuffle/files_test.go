package reshuffle

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/checkpoint"
)

// closed is a directory with one name that its owner alone may open. Modes do not keep root out, as whom tests may run.
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

// Stat tells of a file that cannot be opened, as the system does.
func (c closed) Stat(name string) (fs.FileInfo, error) { return fs.Stat(c.FS, name) }

// TestClosedFiles: a directory that may not be read is left out, such as the lost+found of a volume whose root is the model; without a
// file there is no copy of the model, now or later.
func TestClosedFiles(t *testing.T) {
	c, m := turned(t)
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

// TestModelVolumeHoldsOutputs: where outputs lie on the model's volume, neither they nor what runs have beside them are of the model,
// at any depth; even where one vanishes while it is looked at.
func TestModelVolumeHoldsOutputs(t *testing.T) {
	c, m := turned(t)
	for _, name := range []string{"", "cache/"} {
		for _, file := range []string{"KEY/" + ManifestFile, "KEY/tokenizer.json", "KEY/sub/vocabulary.txt", "old/" + ManifestFile, "old/x.safetensors",
			".NEW.0123456789abcdef.partial/tokenizer.json", ".KEY.used", ".NEW.lock", ".NEW.used", ".NEW.probe-123", roomLock} {
			writeFile(t, filepath.Join(c.Dir, name+file), []byte("{}"))
		}
	}
	own := []string{"sub/vocabulary.txt", "tokenizer.json", ".gitattributes", "poetry.lock", "x.used"}
	// The model may be an output.
	for _, file := range append([]string{ManifestFile}, own...) {
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
		t.Errorf("copied are %q, left out %q", files.copied, files.leftOut)
	}
}

// vanishing is a directory with one name that is listed but is gone when it is opened.
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
