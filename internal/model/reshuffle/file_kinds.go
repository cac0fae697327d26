// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver/modelconfig"
)

const (
	// maxScannedBytes is the maximum size of a configuration file that is scanned. Descriptions of quantisation have a
	// line for each tensor.
	maxScannedBytes = 64 << 20
	// maxYAMLBytes is the maximum size of a YAML file. Parsed values take many times the size of the file.
	maxYAMLBytes = 1 << 20
	// sniffedBytes is the number of bytes read to distinguish text from binary data.
	sniffedBytes = 8 << 10
)

var (
	// aboutExperts matches names of files with data about experts, such as eplb_stats.json or imatrix.dat.
	aboutExperts = regexp.MustCompile(`(?i)experts?([^a-z]|$)|eplb|imatrix|rout(er|ing)([^a-z]|$)`)
	// ofTokenizer matches names of files about tokens and other inputs. Numbers in such files are token IDs, not expert
	// IDs.
	ofTokenizer = regexp.MustCompile(`(?i)token|vocab|merges|chat_template|processor|tekken`)
	// ofRecord matches names of records of training and evaluation. Engines do not read them, so a record that names
	// experts is left out.
	ofRecord = regexp.MustCompile(`^(trainer_(state|log)|training_args|recipe|golden|(all|train|eval|test|predict)_results)\.|^mergekit`)
	// ofAdapter matches names of files of LoRA adapters.
	ofAdapter = regexp.MustCompile(`(?i)^adapter_(config|model)|lora`)
)

// documents lists the extensions of files that are read by people or interpreters, or that contain images, sound or a
// tokenizer.
var documents = []string{
	".md", ".py", ".pyc", ".jinja", ".jinja2", ".pdf", ".html", ".ipynb", ".sh", ".rst", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".ico", ".mp4",
	".webm", ".mov", ".wav", ".mp3", ".flac", ".ttf", ".otf", ".woff", ".woff2", ".model", ".tiktoken", ".spm", ".bpe",
}

// yamlBegin matches comments, directives and the separator before the first YAML document, and yamlSeparator the line
// between two documents.
var (
	yamlBegin     = regexp.MustCompile(`^(?:[ \t]*(?:[#%].*)?\r?\n)*---`)
	yamlSeparator = regexp.MustCompile(`(?m)^(?:---|\.\.\.)(?:\s|$)`)
)

// settings lists the extensions of text files that programs read, in addition to JSON and YAML.
var settings = []string{".json", ".jsonl", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".env", ".properties", ".xml", ".csv", ".tsv"}

// add classifies a file that is not a shard. The file is copied if it is known not to name experts by number, rewritten
// if its format is known, and left out if it contains the same weights in another format. Any other file is refused.
func (f *sourceFiles) add(ctx context.Context, root fs.FS, renamer *expertRenamer, name string) error {
	base, extension := path.Base(name), strings.ToLower(path.Ext(name))
	moves := len(renamer.m.toNew) > 0
	about := aboutExperts.MatchString(base) && !slices.Contains(documents, extension)
	switch {
	case moves && ofAdapter.MatchString(base) && (isWeights(base) || base == "adapter_config.json"):
		return f.addAdapter(ctx, root, renamer, name)
	case moves && about:
		return refuseFile(renamer.c, name, "its name suggests that it is about experts or gates, and its format is unknown")
	case isWeights(base):
		f.leftOut = append(f.leftOut, name)
		return nil
	case name == checkpoint.ConfigFile, isConfiguration(name):
		return f.addConfiguration(ctx, root, renamer, name)
	case !moves || slices.Contains(documents, extension) || ofTokenizer.MatchString(base) || base == "training_args.bin" || strings.HasPrefix(base, "."):
		return f.addCopied(root, name)
	case extension == ".json", extension == ".yaml", extension == ".yml":
		return f.orLeaveOut(f.addStructured(ctx, root, renamer, name), name)
	}
	return f.orLeaveOut(f.addText(root, renamer, name), name)
}

// orLeaveOut leaves out a record that was refused.
func (f *sourceFiles) orLeaveOut(err error, name string) error {
	if checkpoint.IsInvalid(err) && ofRecord.MatchString(path.Base(name)) {
		f.leftOut = append(f.leftOut, name)
		return nil
	}
	return err
}

func refuseFile(c *checkpoint.Checkpoint, name, format string, args ...any) error {
	return checkpoint.Invalidf("%s: its dependence on the order of the experts is unknown: "+format, append([]any{filepath.Join(c.Dir, name)}, args...)...)
}

// isWeights reports whether a file contains weights outside of the index. It is the same model in another format, still
// in the old order.
func isWeights(name string) bool {
	name, _ = strings.CutSuffix(name, ".index.json")
	switch path.Ext(name) {
	case ".safetensors", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".npz", ".nemo":
		return true
	case ".bin": // training_args.bin and tokenizer files are not weights
		return strings.HasPrefix(name, "consolidated") || strings.Contains(name, "model") && !strings.Contains(name, "tokenizer")
	case ".json":
		return strings.HasPrefix(name, "pytorch_model")
	}
	return strings.Contains(name, ".onnx") // also matches the data files next to an .onnx file
}

// isConfiguration reports whether a file describes quantisation for engines.
func isConfiguration(name string) bool {
	return !strings.Contains(name, "/") && path.Ext(name) == ".json" && strings.Contains(name, "quant")
}

func (f *sourceFiles) addConfiguration(ctx context.Context, root fs.FS, renamer *expertRenamer, name string) error {
	c := renamer.c
	text := c.ConfigText
	if name != checkpoint.ConfigFile {
		var err error
		if text, err = readBounded(root, c, name, maxScannedBytes); err != nil {
			return err
		}
	}
	text, err := renamer.rename(ctx, text)
	if err != nil {
		return inFile(c, name, err)
	}
	f.rewritten[name] = text
	return nil
}

// inFile adds the name of a file to an InvalidError.
func inFile(c *checkpoint.Checkpoint, name string, err error) error {
	if !checkpoint.IsInvalid(err) {
		return err
	}
	return checkpoint.Invalidf("%s: %v", filepath.Join(c.Dir, name), err)
}

// addStructured checks a JSON or YAML file of any other name. A JSON file that names experts is rewritten; such a YAML
// file is refused. A file that does not parse is treated as text.
func (f *sourceFiles) addStructured(ctx context.Context, root fs.FS, renamer *expertRenamer, name string) error {
	limit := int64(maxScannedBytes)
	if path.Ext(name) != ".json" {
		limit = maxYAMLBytes
	}
	text, err := readBounded(root, renamer.c, name, limit)
	if err != nil {
		return err
	}
	if path.Ext(name) == ".json" {
		text := bytes.TrimPrefix(text, []byte("\xef\xbb\xbf"))
		if !json.Valid(modelconfig.Strict(text)) {
			return f.addText(root, renamer, name)
		}
		renamed, err := renamer.rename(ctx, text)
		if err != nil {
			return inFile(renamer.c, name, err)
		}
		if bytes.Equal(renamed, text) {
			return f.addCopied(root, name)
		}
		f.rewritten[name] = renamed
		return nil
	}
	if yamlSeparator.Match(yamlBegin.ReplaceAll(text, nil)) {
		return refuseFile(renamer.c, name, "it contains several YAML documents")
	}
	converted, err := yaml.YAMLToJSON(text)
	if err != nil {
		return f.addText(root, renamer, name)
	}
	renamed, err := renamer.rename(ctx, converted)
	switch {
	case err != nil:
		return inFile(renamer.c, name, err)
	case bytes.Equal(renamed, converted):
		return f.addCopied(root, name)
	}
	return refuseFile(renamer.c, name, "it names experts, and YAML files cannot be rewritten")
}

// addText copies a file of an unknown kind if it is text that names no expert by number. Any other file is refused.
func (f *sourceFiles) addText(root fs.FS, renamer *expertRenamer, name string) error {
	file, err := root.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	beginning, err := io.ReadAll(io.LimitReader(file, maxYAMLBytes))
	if err != nil {
		return err
	}
	if bytes.IndexByte(beginning[:min(len(beginning), sniffedBytes)], 0) >= 0 {
		return refuseFile(renamer.c, name, "it is a binary file of an unknown format")
	}
	switch text := string(beginning); {
	case modelconfig.NamesExpert(text):
		return refuseFile(renamer.c, name, "it names experts by number")
	case slices.Contains(settings, strings.ToLower(path.Ext(name))) && modelconfig.RelatesToExperts(text):
		return refuseFile(renamer.c, name, "it mentions experts or gates, and only JSON and YAML files can be checked")
	}
	return f.addCopied(root, name)
}

// readBounded reads a file of the checkpoint and refuses one that is larger than limit bytes.
func readBounded(root fs.FS, c *checkpoint.Checkpoint, name string, limit int64) ([]byte, error) {
	file, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = refuseFile(c, name, "it is larger than %d bytes", limit)
	}
	return text, err
}

// addAdapter copies the files of an adapter that changes neither a routed expert nor a gate. Any other adapter is
// refused: engines apply it by the expert numbers of the model.
func (f *sourceFiles) addAdapter(ctx context.Context, root fs.FS, renamer *expertRenamer, name string) error {
	c := renamer.c
	if path.Base(name) == "adapter_config.json" {
		return f.addStructured(ctx, root, renamer, name)
	}
	if path.Ext(name) != ".safetensors" {
		return refuseFile(c, name, "only adapters in safetensors files are supported")
	}
	file, err := checkpoint.OpenFile(filepath.Join(c.Dir, name))
	if err != nil {
		return err
	}
	defer file.Close()
	for tensor := range file.Tensors {
		inModel, _ := strings.CutPrefix(tensor, "base_model.model.")
		if !c.Config.Independent(inModel) {
			return refuseFile(c, name, "tensor %q of the adapter may change a routed expert or a gate: serve the adapter without a plan, or merge it into the model", tensor)
		}
	}
	return f.addCopied(root, name)
}

// checkIndex requires that the index contains no data about experts other than the locations of their tensors.
func checkIndex(c *checkpoint.Checkpoint) error {
	text, err := c.ReadIndex()
	if err != nil {
		return err
	}
	var index struct {
		Metadata json.RawMessage `json:"metadata"`
	}
	if err := json.Unmarshal(text, &index); err != nil || len(index.Metadata) == 0 {
		return err
	}
	return inFile(c, c.IndexName, c.Config.CheckEntries(index.Metadata))
}

// allowedRoot returns the directory that the links of a model must not leave. It is the model's own directory. In a
// cache of the Hugging Face Hub, where the files of snapshots/REVISION are links to ../../blobs, it is the directory of
// the repository.
func allowedRoot(dir string) (string, error) {
	real, err := filepath.Abs(dir)
	if err == nil {
		real, err = filepath.EvalSymlinks(real)
	}
	if err != nil {
		return "", err
	}
	if snapshots := filepath.Dir(real); filepath.Base(snapshots) == "snapshots" {
		return filepath.Dir(snapshots), nil
	}
	return real, nil
}

// checkLink refuses a link that leads out of the model. The readers of the copy may have no permission to read the
// target.
func checkLink(dir, name string, entry fs.DirEntry) error {
	if entry.Type()&fs.ModeSymlink == 0 {
		return nil
	}
	_, _, err := resolveInside(dir, name)
	return err
}

// resolveInside resolves the links of a model's file. It returns the directory that the links must not leave, and the
// path of the file relative to this directory.
func resolveInside(dir, name string) (root, inside string, err error) {
	if root, err = allowedRoot(dir); err != nil {
		return "", "", err
	}
	target, err := filepath.EvalSymlinks(filepath.Join(dir, name))
	if err != nil {
		return "", "", err
	}
	if target, err = filepath.Abs(target); err != nil {
		return "", "", err
	}
	if !within(root, target) {
		return "", "", checkpoint.Invalidf("%s is a link to %s, outside of %s: copy the file into the model's directory", filepath.Join(dir, name), target, root)
	}
	inside, err = filepath.Rel(root, target)
	return root, inside, err
}

// openInside opens a regular file of the model. The opened file is inside the model even if links change concurrently.
func openInside(dir, name string) (*os.File, error) {
	path, inside, err := resolveInside(dir, name)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	file, err := root.OpenFile(inside, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		file.Close()
		return nil, cmp.Or(err, checkpoint.Invalidf("%s is not a regular file", filepath.Join(dir, name)))
	}
	return file, nil
}
