package checkpoint

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/semmoe/operator/solver/modelconfig"
)

// The files of a checkpoint that are not shards.
const (
	ConfigFile = "config.json"
	IndexFile  = "model.safetensors.index.json"
)

const (
	configFile      = ConfigFile
	indexFile       = IndexFile
	singleShardFile = "model.safetensors"

	// maxJSONBytes bounds config.json and the index; the index of the largest known models is about 20 MB.
	maxJSONBytes = 256 << 20
)

// Checkpoint is an opened checkpoint directory: config, index and shard headers agree with each other. It is safe for
// concurrent reads and must be closed.
type Checkpoint struct {
	Dir    string
	Config *Config
	// ConfigText is config.json as stored.
	ConfigText []byte
	// IndexName is the name of the index in Dir; empty for a checkpoint without one.
	IndexName string
	// Shards are the open safetensors files in name order.
	Shards []*File
	// shardOf maps each tensor to its file.
	shardOf map[string]*File
	digest  string
}

// Open opens and validates the checkpoint in dir without loading any weight: the config is readable, the index and
// the shards name the same tensors, and every shard is as long as its header says.
func Open(dir string) (*Checkpoint, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, classify("model path", dir, err)
	}
	if !info.IsDir() {
		return nil, Invalidf("model path %s is a file; give the directory that holds %s", dir, configFile)
	}
	configText, err := readSmallFile("model config", filepath.Join(dir, configFile))
	if err != nil {
		return nil, err
	}
	config, err := ParseConfig(configText)
	if err != nil {
		return nil, Invalidf("%s: %v", filepath.Join(dir, configFile), err)
	}
	indexName, err := findIndex(dir)
	if err != nil {
		return nil, err
	}
	indexText, weightMap, err := readIndex(dir, indexName)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{Dir: dir, Config: config, ConfigText: configText, IndexName: indexName, shardOf: map[string]*File{}}
	if err := c.openShards(weightMap); err != nil {
		c.Close()
		return nil, err
	}
	c.digest = digest(configText, indexText, c.Shards)
	return c, nil
}

// Close closes the shards.
func (c *Checkpoint) Close() error {
	var errs []error
	for _, shard := range c.Shards {
		errs = append(errs, shard.Close())
	}
	return errors.Join(errs...)
}

// Float32 reads a tensor as float32 values, row-major.
func (c *Checkpoint) Float32(name string) ([]float32, error) {
	shard, ok := c.shardOf[name]
	if !ok {
		return nil, Invalidf("checkpoint %s has no tensor %q", c.Dir, name)
	}
	return shard.Float32(name)
}

// Tensor describes a tensor of the checkpoint.
func (c *Checkpoint) Tensor(name string) (Tensor, bool) {
	shard, ok := c.shardOf[name]
	if !ok {
		return Tensor{}, false
	}
	return shard.Tensors[name], true
}

// Shard is the file that holds a tensor.
func (c *Checkpoint) Shard(tensor string) (*File, bool) {
	shard, ok := c.shardOf[tensor]
	return shard, ok
}

// ReadIndex reads the text of the index. It is not kept: that of a large model has tens of megabytes.
func (c *Checkpoint) ReadIndex() ([]byte, error) {
	return readSmallFile("index", filepath.Join(c.Dir, c.IndexName))
}

// Digest identifies the model: sha256, in hex, over config.json, the index and each shard's name, size and header.
// Weights are not read, so two models that differ only in values of equal layout share a digest.
func (c *Checkpoint) Digest() string { return c.digest }

// Bytes is the total size of the shards.
func (c *Checkpoint) Bytes() int64 {
	var total int64
	for _, shard := range c.Shards {
		total += shard.Size
	}
	return total
}

// readIndex reads the index of the given name; text and map are empty where the name is.
func readIndex(dir, name string) (text []byte, weightMap map[string]string, err error) {
	if name == "" {
		return nil, nil, nil
	}
	path := filepath.Join(dir, name)
	if text, err = readSmallFile("index", path); err != nil {
		return nil, nil, err
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, nil, Invalidf("%s: not a valid index: %v", path, err)
	}
	if len(index.WeightMap) == 0 {
		return nil, nil, Invalidf("%s: weight_map is missing or empty", path)
	}
	for tensor, file := range index.WeightMap {
		// A path would let an index reach outside the checkpoint.
		if file != filepath.Base(file) || !strings.HasSuffix(file, ".safetensors") {
			return nil, nil, Invalidf("%s: tensor %q lies in %q; only names of .safetensors files beside the index are allowed", path, tensor, file)
		}
	}
	return text, index.WeightMap, nil
}

// openShards opens the files that the index names, or those that hold the weights where there is no index, and compares both.
func (c *Checkpoint) openShards(weightMap map[string]string) error {
	files := map[string]bool{}
	for _, file := range weightMap {
		files[file] = true
	}
	if len(files) == 0 {
		names, err := unindexedShards(c.Dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			files[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		shard, err := OpenFile(filepath.Join(c.Dir, name))
		if err != nil {
			return err
		}
		c.Shards = append(c.Shards, shard)
		for tensor := range shard.Tensors {
			if other, twice := c.shardOf[tensor]; twice {
				return Invalidf("tensor %q is in both %s and %s: keep the files of one checkpoint only, or add its index", tensor, other.Path, shard.Path)
			}
			if weightMap != nil && weightMap[tensor] != name {
				return Invalidf("%s holds tensor %q, which %s does not place there: index and shards are of different checkpoints", shard.Path, tensor, c.IndexName)
			}
			c.shardOf[tensor] = shard
		}
	}
	for tensor, file := range weightMap {
		if _, ok := c.shardOf[tensor]; !ok {
			return Invalidf("%s does not hold tensor %q, which %s places there: index and shards are of different checkpoints", filepath.Join(c.Dir, file), tensor, c.IndexName)
		}
	}
	return nil
}

// digest frames each part with its length, so that no two different checkpoints have the same byte stream.
func digest(config, index []byte, shards []*File) string {
	h := sha256.New()
	frame(h, config)
	frame(h, index)
	for _, shard := range shards {
		frame(h, []byte(filepath.Base(shard.Path)))
		frame(h, shard.HeaderText)
		frame(h, binary.LittleEndian.AppendUint64(nil, uint64(shard.Size)))
	}
	return hex.EncodeToString(h.Sum(nil))
}

func frame(h hash.Hash, part []byte) {
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(part))))
	h.Write(part)
}

// readSmallFile reads a JSON file, bounded.
func readSmallFile(what, path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, classify(what, path, err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxJSONBytes {
		return nil, Invalidf("%s %s is not a regular file of at most %d bytes", what, path, maxJSONBytes)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, classify(what, path, err)
	}
	if len(text) == 0 {
		return nil, Invalidf("%s %s is empty", what, path)
	}
	if err := checkPlaceholder(text); err != nil {
		return nil, Invalidf("%s %s %v", what, path, err)
	}
	return text, nil
}

// ReadJSON reads a further JSON file of the checkpoint into value; found is false where the file does not exist.
func (c *Checkpoint) ReadJSON(name string, value any) (found bool, err error) {
	path := filepath.Join(c.Dir, name)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	text, err := readSmallFile("file", path)
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(modelconfig.Strict(text), value); err != nil {
		return false, Invalidf("%s: %v", path, err)
	}
	return true, nil
}
