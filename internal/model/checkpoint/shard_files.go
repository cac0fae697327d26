// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const indexSuffix = ".safetensors.index.json"

// findIndex returns the name of the checkpoint's index, or an empty name if there is none. If the name that
// transformers uses does not exist, the only file with the suffix is used, such as
// quant_model_weights.safetensors.index.json of msModelSlim.
func findIndex(dir string) (string, error) {
	if _, err := os.Stat(filepath.Join(dir, indexFile)); !errors.Is(err, fs.ErrNotExist) {
		return indexFile, nil
	}
	names, err := weightFiles(dir, indexSuffix)
	if err != nil || len(names) == 0 {
		return "", err
	}
	if len(names) > 1 {
		return "", Invalidf("%s has several indices, %s, and none is named %s: keep one", dir, strings.Join(names, " and "), indexFile)
	}
	return names[0], nil
}

// weightFiles lists the files of a checkpoint directory with a suffix, except files with other weights: adapters, and
// the original format of Mistral models.
func weightFiles(dir, suffix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, classify("model path", dir, err)
	}
	var names []string
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasSuffix(name, suffix) && !strings.HasPrefix(name, ".") && !strings.HasPrefix(name, "consolidated") && !strings.HasPrefix(name, "adapter") {
			names = append(names, name)
		}
	}
	return names, nil
}

// numberedShard matches the name of one of several numbered files. The groups are the base name, the number and the
// number of files.
var numberedShard = regexp.MustCompile(`^(.+)-(\d+)-of-(\d+)\.safetensors$`)

// unindexedShards returns the weight files of a checkpoint without an index: model.safetensors, or else all safetensors
// files. Numbered files must be one complete set.
func unindexedShards(dir string) ([]string, error) {
	if _, err := os.Stat(filepath.Join(dir, singleShardFile)); !errors.Is(err, fs.ErrNotExist) {
		return []string{singleShardFile}, nil
	}
	names, err := weightFiles(dir, ".safetensors")
	if err != nil {
		return nil, err
	}
	if other := otherFormat(dir); len(names) == 0 && other != "" {
		return nil, Invalidf("%s %s", dir, other)
	}
	if len(names) == 0 {
		return nil, Invalidf("%s has neither %s nor %s, nor another safetensors file: it is not a safetensors checkpoint, or incomplete", dir, indexFile, singleShardFile)
	}
	for _, name := range names {
		if err := checkNumbered(dir, name, names); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// otherFormats maps patterns of weight files in formats that are not supported to the names of the formats.
var otherFormats = []struct{ pattern, format string }{
	{"*.gguf", "GGUF"}, {"consolidated*.safetensors", "Mistral's own format"}, {"*model*.bin", "PyTorch's format"}, {"*.pt", "PyTorch's format"},
	{"*.pth", "PyTorch's format"}, {"*.onnx", "ONNX"}, {"*.h5", "TensorFlow's format"}, {"*.msgpack", "Flax's format"}, {"*.nemo", "NeMo's format"},
}

// otherFormat describes a directory without a safetensors checkpoint in the layout of transformers that contains weights
// in another format. It returns an empty string for any other directory.
func otherFormat(dir string) string {
	for _, other := range otherFormats {
		if found, err := fs.Glob(os.DirFS(dir), other.pattern); err == nil && len(found) > 0 {
			return fmt.Sprintf("contains weights in %s (%s), which is not supported: use the model's safetensors checkpoint, as transformers writes it", other.format, found[0])
		}
	}
	return ""
}

// checkNumbered requires that all files of a numbered set exist.
func checkNumbered(dir, name string, names []string) error {
	parts := numberedShard.FindStringSubmatch(name)
	if parts == nil {
		return nil
	}
	count, err := strconv.Atoi(parts[3])
	if err != nil || count > maxShards {
		return Invalidf("%s: %s is one of more than %d files", dir, name, maxShards)
	}
	for number := 1; number <= count; number++ {
		other := fmt.Sprintf("%s-%0*d-of-%s.safetensors", parts[1], len(parts[2]), number, parts[3])
		if _, found := slices.BinarySearch(names, other); !found {
			return Invalidf("%s has %s but not %s: fetch the missing file", dir, name, other)
		}
	}
	return nil
}

// maxShards is the maximum number of files of a checkpoint without an index. The largest known models have a few
// hundred.
const maxShards = 1 << 14

// placeholderBytes is the number of bytes that checkPlaceholder needs.
const placeholderBytes = 64

// checkPlaceholder returns an error if a text is a placeholder for a file that was not downloaded.
func checkPlaceholder(text []byte) error {
	text = bytes.ToLower(bytes.TrimLeft(text[:min(len(text), placeholderBytes)], "\xef\xbb\xbf \t\r\n"))
	switch {
	case bytes.HasPrefix(text, []byte("version https://git-lfs.github.com/")), bytes.HasPrefix(text, []byte("version https://hawser.github.com/")):
		return Invalidf("is a git-lfs pointer, not the file: run git lfs pull, or fetch the file again")
	case bytes.HasPrefix(text, []byte("<!doctype html")), bytes.HasPrefix(text, []byte("<html")), bytes.HasPrefix(text, []byte("<?xml")):
		return Invalidf("is a web page, not the file: the download returned an error page or a login page; fetch the file again")
	case bytes.HasPrefix(text, []byte("gguf")):
		return Invalidf("is a GGUF file, which is not supported: use the model's safetensors checkpoint")
	case bytes.HasPrefix(text, []byte("pk\x03\x04")) && !bytes.HasPrefix(text[min(len(text), 8):], []byte("{")):
		return Invalidf("is a PyTorch file or another zip archive, which is not supported: use the model's safetensors checkpoint")
	}
	return nil
}

// checkEncoding returns an error if a JSON text is not encoded in UTF-8, or begins with a byte order mark, which Python's
// json module refuses.
func checkEncoding(text []byte) error {
	for _, mark := range []string{"\xff\xfe", "\xfe\xff", "\xef\xbb\xbf"} {
		if bytes.HasPrefix(text, []byte(mark)) {
			return Invalidf("begins with a byte order mark: save it as UTF-8 without one")
		}
	}
	return nil
}
