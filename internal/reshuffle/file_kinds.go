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

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/solver/modelconfig"
)

const (
	// maxScannedBytes bounds a configuration that is checked; descriptions of quantisation have a line for each tensor.
	maxScannedBytes = 64 << 20
	// maxYAMLBytes bounds a YAML file, whose values take many times its size.
	maxYAMLBytes = 1 << 20
	// sniffedBytes is how much of a file is read to distinguish text from other data.
	sniffedBytes = 8 << 10
)

var (
	// aboutExperts matches names of files with data about experts, such as eplb_stats.json or imatrix.dat.
	aboutExperts = regexp.MustCompile(`(?i)experts?([^a-z]|$)|eplb|imatrix|rout(er|ing)([^a-z]|$)`)
	// ofTokenizer matches names of files about tokens and other inputs: their numbers are those of tokens.
	ofTokenizer = regexp.MustCompile(`(?i)token|vocab|merges|chat_template|processor|tekken`)
	// ofRecord matches names of records of how a model was made and tested. Engines do not read them: one that names experts is left out.
	ofRecord = regexp.MustCompile(`^(trainer_state|training_args|recipe|golden|(all|train|eval|test|predict)_results)\.|^mergekit`)
	// ofAdapter matches names of files of LoRA adapters.
	ofAdapter = regexp.MustCompile(`(?i)^adapter_(config|model)|lora`)
)

// documents are the extensions of files that people and interpreters read, or that hold pictures, sound or a tokenizer.
var documents = []string{
	".md", ".py", ".pyc", ".jinja", ".jinja2", ".pdf", ".html", ".ipynb", ".sh", ".rst", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".ico", ".mp4",
	".webm", ".mov", ".wav", ".mp3", ".flac", ".ttf", ".otf", ".woff", ".woff2", ".model", ".tiktoken", ".spm", ".bpe",
}

// add decides what becomes of a file that is no shard: it is copied if it is known not to name experts by number, rewritten if it is
// understood, left out if it holds the same weights in another form, and refused otherwise.
func (f *sourceFiles) add(ctx context.Context, root fs.FS, mentions *mentions, name string) error {
	base, extension := path.Base(name), strings.ToLower(path.Ext(name))
	moves := len(mentions.m.toNew) > 0
	about := aboutExperts.MatchString(base) && !slices.Contains(documents, extension)
	switch {
	case moves && ofAdapter.MatchString(base) && (isWeights(base) || base == "adapter_config.json"):
		return f.addAdapter(ctx, root, mentions, name)
	case moves && about:
		return refuseFile(mentions.c, name, "by its name it is about experts or their gates, and its form is not known")
	case isWeights(base):
		f.leftOut = append(f.leftOut, name)
		return nil
	case name == checkpoint.ConfigFile, isConfiguration(name):
		return f.addConfiguration(ctx, root, mentions, name)
	case !moves || slices.Contains(documents, extension) || ofTokenizer.MatchString(base) || base == "training_args.bin" || strings.HasPrefix(base, "."):
		return f.addCopied(root, name)
	case extension == ".json", extension == ".yaml", extension == ".yml":
		err := f.addStructured(ctx, root, mentions, name)
		if checkpoint.IsInvalid(err) && ofRecord.MatchString(base) {
			f.leftOut = append(f.leftOut, name)
			return nil
		}
		return err
	}
	return f.addText(root, mentions, name)
}

func refuseFile(c *checkpoint.Checkpoint, name, format string, args ...any) error {
	return checkpoint.Invalidf("%s: its dependence on the order of the experts is unknown: "+format, append([]any{filepath.Join(c.Dir, name)}, args...)...)
}

// isWeights recognises weights outside of the index: the same model in another form, still in the old order.
func isWeights(name string) bool {
	name, _ = strings.CutSuffix(name, ".index.json")
	switch path.Ext(name) {
	case ".safetensors", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".npz", ".nemo":
		return true
	case ".bin": // training_args.bin, and what belongs to a tokenizer, are not
		return strings.HasPrefix(name, "consolidated") || strings.Contains(name, "model") && !strings.Contains(name, "tokenizer")
	case ".json":
		return strings.HasPrefix(name, "pytorch_model")
	}
	return strings.Contains(name, ".onnx") // and the files next to it that hold its data
}

// isConfiguration recognises the files in which engines look for what is quantised and how.
func isConfiguration(name string) bool {
	return !strings.Contains(name, "/") && path.Ext(name) == ".json" && strings.Contains(name, "quant")
}

func (f *sourceFiles) addConfiguration(ctx context.Context, root fs.FS, mentions *mentions, name string) error {
	c := mentions.c
	text := c.ConfigText
	if name != checkpoint.ConfigFile {
		var err error
		if text, err = readBounded(root, c, name, maxScannedBytes); err != nil {
			return err
		}
	}
	text, err := mentions.rename(ctx, text)
	if err != nil {
		return inFile(c, name, err)
	}
	f.rewritten[name] = text
	return nil
}

// inFile adds the name of a file to an error of the checkpoint.
func inFile(c *checkpoint.Checkpoint, name string, err error) error {
	if !checkpoint.IsInvalid(err) {
		return err
	}
	return checkpoint.Invalidf("%s: %v", filepath.Join(c.Dir, name), err)
}

// addStructured checks a JSON or YAML file of any other name. One that names experts is rewritten if it is JSON. What is not valid is text.
func (f *sourceFiles) addStructured(ctx context.Context, root fs.FS, mentions *mentions, name string) error {
	limit := int64(maxScannedBytes)
	if path.Ext(name) != ".json" {
		limit = maxYAMLBytes
	}
	text, err := readBounded(root, mentions.c, name, limit)
	if err != nil {
		return err
	}
	if path.Ext(name) == ".json" {
		if !json.Valid(text) {
			return f.addText(root, mentions, name)
		}
		renamed, err := mentions.rename(ctx, text)
		if err != nil {
			return inFile(mentions.c, name, err)
		}
		if bytes.Equal(renamed, text) {
			return f.addCopied(root, name)
		}
		f.rewritten[name] = renamed
		return nil
	}
	converted, err := yaml.YAMLToJSON(text)
	if err != nil {
		return f.addText(root, mentions, name)
	}
	renamed, err := mentions.rename(ctx, converted)
	switch {
	case err != nil:
		return inFile(mentions.c, name, err)
	case bytes.Equal(renamed, converted):
		return f.addCopied(root, name)
	}
	return refuseFile(mentions.c, name, "it names experts, and YAML is not rewritten")
}

// addText takes a file of an unknown kind if it is text that names no expert by number.
func (f *sourceFiles) addText(root fs.FS, mentions *mentions, name string) error {
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
		return refuseFile(mentions.c, name, "it is no text, and its form is not known")
	}
	if settings := []string{".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".properties", ".xml"}; slices.Contains(settings, path.Ext(name)) {
		if modelconfig.NamesExpert(string(beginning)) {
			return refuseFile(mentions.c, name, "it names experts by number")
		}
	}
	return f.addCopied(root, name)
}

// readBounded reads a file of the checkpoint.
func readBounded(root fs.FS, c *checkpoint.Checkpoint, name string, limit int64) ([]byte, error) {
	file, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = refuseFile(c, name, "it has more than %d bytes", limit)
	}
	return text, err
}

// addAdapter takes the files of an adapter that changes no routed expert and no gate. Engines apply the others by the numbers that experts
// have in the model.
func (f *sourceFiles) addAdapter(ctx context.Context, root fs.FS, mentions *mentions, name string) error {
	c := mentions.c
	if path.Base(name) == "adapter_config.json" {
		return f.addStructured(ctx, root, mentions, name)
	}
	if path.Ext(name) != ".safetensors" {
		return refuseFile(c, name, "adapters other than safetensors files are not read")
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

// checkIndex requires that the index says nothing of experts besides the places of their tensors.
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

// allowedRoot is the directory that the links of a model may not leave: the model's own, or in a cache of the Hugging Face Hub, where the
// files of snapshots/REVISION are links to ../../blobs, the repository's.
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

// checkLink refuses a link that leads out of the model: its target may be a file that the readers of the copy may not see.
func checkLink(dir, name string, entry fs.DirEntry) error {
	if entry.Type()&fs.ModeSymlink == 0 {
		return nil
	}
	_, _, err := resolveInside(dir, name)
	return err
}

// resolveInside follows the links of a model's file, and returns the directory that they may not leave and the path below it.
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

// openInside opens a regular file of the model, even if its links change at the same time: an opened file is never outside of the model.
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
