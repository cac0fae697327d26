// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/maphash"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/model/family"
	"github.com/semmoe/operator/solver/modelconfig"
)

// Names of checkpoint files other than shards.
const (
	ConfigFile = "config.json"
	IndexFile  = "model.safetensors.index.json"
)

const (
	configFile      = ConfigFile
	indexFile       = IndexFile
	singleShardFile = "model.safetensors"

	// maxJSONBytes is the maximum size of config.json and of the index. The index of the largest known models has about
	// 20 MB.
	maxJSONBytes = 256 << 20
)

// Checkpoint is an opened checkpoint directory with consistent config, index and shard headers. It is safe for
// concurrent reads and must be closed.
type Checkpoint struct {
	Dir    string
	Config *Config
	// ConfigText is config.json as stored.
	ConfigText []byte
	// IndexName is the name of the index in Dir. It is empty for a checkpoint without an index.
	IndexName string
	// Shards lists the open safetensors files in name order.
	Shards []*File
	// shardOf maps each tensor to its file.
	shardOf map[string]*File
	digest  string
	// noPlan is the reason why no plan can be made for the model. It is nil if a plan can be made.
	noPlan *NoPlanError
}

// Open opens and validates the checkpoint in dir without loading any weight. It checks that the config can be parsed,
// that the index and the shards contain the same tensors, and that the size of every shard matches its header.
func Open(dir string) (*Checkpoint, error) { return OpenAs(dir, "") }

// OpenAs opens a checkpoint that is laid out as a known model type. An empty layoutAs means the model's own type. The
// checkpoint must then pass the strict checks of CheckPermutable.
func OpenAs(dir, layoutAs string) (*Checkpoint, error) {
	c, err := open(dir, layoutAs)
	if err != nil || c.noPlan == nil {
		return c, err
	}
	c.Close()
	if layoutAs == "" && family.Lookup(c.noPlan.ModelType) == nil {
		return nil, Invalidf("%s: %v; known are %s", dir, c.noPlan, strings.Join(family.Types(), ", "))
	}
	return nil, Invalidf("%s: %v", dir, c.noPlan)
}

// open opens the checkpoint, also if no plan can be made for the model.
func open(dir, layoutAs string) (*Checkpoint, error) {
	if layoutAs != "" && family.Lookup(layoutAs) == nil {
		return nil, Invalidf("layout %.64q is unknown: use one of %s", layoutAs, strings.Join(family.Types(), ", "))
	}
	info, err := os.Stat(dir)
	if err != nil {
		return nil, classify("model path", dir, err)
	}
	if !info.IsDir() {
		return nil, Invalidf("model path %s is a file; use the directory that contains %s", dir, configFile)
	}
	if _, err := os.Stat(filepath.Join(dir, configFile)); errors.Is(err, fs.ErrNotExist) {
		weights, _ := weightFiles(dir, ".safetensors")
		if other := otherFormat(dir); other != "" && len(weights) == 0 {
			return nil, Invalidf("%s has no %s and %s", dir, configFile, other)
		}
	}
	configText, err := readSmallFile("model config", filepath.Join(dir, configFile))
	if err != nil {
		return nil, err
	}
	config, err := parseConfig(configText, layoutAs)
	noPlan, _ := errors.AsType[*NoPlanError](err)
	if noPlan != nil {
		config, noPlan.Reason = &Config{ModelType: noPlan.ModelType, LayoutAs: layoutAs}, configFile+": "+noPlan.Reason
	} else if err != nil {
		return nil, Invalidf("%s: %v", filepath.Join(dir, configFile), err)
	}
	indexName, err := findIndex(dir)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{Dir: dir, Config: config, ConfigText: configText, IndexName: indexName, shardOf: map[string]*File{}, noPlan: noPlan}
	if err := c.openShards(); err != nil {
		c.Close()
		return nil, err
	}
	c.selectLayout()
	if layoutAs != "" && c.noPlan == nil {
		c.checkLayoutAs()
	}
	return c, nil
}

// selectLayout selects the first layout of the family that describes a gate of the checkpoint, with the known prefixes
// of layers, or else with the only other prefix of such gates.
func (c *Checkpoint) selectLayout() {
	first := c.Config.family()
	layouts := append([]family.Layout{first.Layout}, first.OtherLayouts...)
	for _, findPrefix := range []bool{false, true} {
		for _, layout := range layouts {
			selected := *first
			selected.Layout, c.Config.layout = layout, &selected
			if findPrefix {
				c.Config.prefix = c.gatePrefix()
			}
			if c.hasGate() {
				return
			}
		}
	}
	c.Config.layout = nil
}

// hasGate reports whether the checkpoint has a tensor of a gate.
func (c *Checkpoint) hasGate() bool {
	for name := range c.shardOf {
		if c.Config.Classify(name).Role == Gate {
			return true
		}
	}
	return false
}

// gatePrefix returns the prefix of the numbered layers whose names contain the path of a gate. It is empty unless there
// is exactly one such prefix, other than those of encoders and other models.
func (c *Checkpoint) gatePrefix() string {
	f, found := c.Config.family(), ""
	gate := regexp.MustCompile(`^((?:[A-Za-z_]\w*\.)+)\d+\.` + regexp.QuoteMeta(strings.TrimPrefix(f.Block+"."+f.Gate, ".")) + `\.`)
	for name := range c.shardOf {
		parts := gate.FindStringSubmatch(name)
		if parts == nil || slices.ContainsFunc(strings.Split(parts[1], "."), func(module string) bool { return slices.Contains(family.OtherModels, module) }) {
			continue
		}
		if found != "" && found != parts[1] {
			return ""
		}
		found = parts[1]
	}
	return found
}

// checkLayoutAs checks the user's statement about the layout. No plan is made for a checkpoint with a tensor that the
// layout does not describe.
func (c *Checkpoint) checkLayoutAs() {
	if c.Config.layersFound {
		c.Config.MoELayers = c.layersWithExperts()
	}
	err := c.CheckPermutable()
	if err == nil && len(c.Config.MoELayers) == 0 {
		err = Invalidf("no tensor belongs to an expert or a gate of this layout")
	}
	if err != nil {
		c.noPlan = &NoPlanError{c.Config.ModelType, fmt.Sprintf("the checkpoint is not laid out as %s: %v", c.Config.LayoutAs, err)}
	}
}

// layersWithExperts returns the hidden layers with tensors of experts or gates, in ascending order.
func (c *Checkpoint) layersWithExperts() []int {
	found := map[int]bool{}
	for name := range c.shardOf {
		part := c.Config.Classify(name)
		if (part.Role == Expert || part.Role == Fused || part.Role == Gate) && part.Layer < c.Config.Layers {
			found[part.Layer] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
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

// Tensor returns the description of a tensor, and false if the checkpoint has no such tensor.
func (c *Checkpoint) Tensor(name string) (Tensor, bool) {
	shard, ok := c.shardOf[name]
	if !ok {
		return Tensor{}, false
	}
	return shard.Tensors[name], true
}

// Shard returns the file that contains a tensor.
func (c *Checkpoint) Shard(tensor string) (*File, bool) {
	shard, ok := c.shardOf[tensor]
	return shard, ok
}

// ReadIndex reads the text of the index. The text is not cached: the index of a large model has tens of megabytes.
func (c *Checkpoint) ReadIndex() ([]byte, error) {
	return readSmallFile("index", filepath.Join(c.Dir, c.IndexName))
}

// Digest returns the sha256, in hex, of config.json, the index and the name, size and header of each shard. It
// identifies the model. Weights are not read, so two models of equal layout that differ only in values have the same
// digest.
func (c *Checkpoint) Digest() string { return c.digest }

// Bytes returns the total size of the shards.
func (c *Checkpoint) Bytes() int64 {
	var total int64
	for _, shard := range c.Shards {
		total += shard.Size
	}
	return total
}

// checkFile requires that the index names a file in its own directory. A path could refer to files outside of the
// checkpoint.
func (c *Checkpoint) checkFile(tensor, file string) error {
	if file != filepath.Base(file) || !strings.HasSuffix(file, ".safetensors") {
		return Invalidf("%s: tensor %q: file %q is invalid: only names of .safetensors files next to the index are allowed", c.listing(), tensor, file)
	}
	return nil
}

// eachIndexed calls a function for every tensor in the weight map of an index. It stores nothing: the index of a large
// model has hundreds of thousands of entries.
func (c *Checkpoint) eachIndexed(text []byte, call func(tensor, file string) error) error {
	path := filepath.Join(c.Dir, c.IndexName)
	invalid := func(err error) error { return Invalidf("%s: not a valid index: %v", path, err) }
	decoder := json.NewDecoder(bytes.NewReader(text))
	if open, err := decoder.Token(); err != nil || open != json.Delim('{') {
		return invalid(cmp.Or(err, errors.New("not a JSON object")))
	}
	entries, found := 0, false
	for decoder.More() {
		member, err := decoder.Token()
		if err != nil {
			return invalid(err)
		}
		if member != "weight_map" {
			var skipped skippedValue
			if err := decoder.Decode(&skipped); err != nil {
				return invalid(err)
			}
			continue
		}
		if found {
			return invalid(errors.New("weight_map appears twice"))
		}
		found = true
		if open, err := decoder.Token(); err != nil || open != json.Delim('{') {
			return invalid(cmp.Or(err, errors.New("weight_map is not an object")))
		}
		for decoder.More() {
			tensor, err := decoder.Token()
			if err != nil {
				return invalid(err)
			}
			file, err := decoder.Token()
			if err != nil {
				return invalid(err)
			}
			name, isName := file.(string)
			if !isName {
				return invalid(fmt.Errorf("the file of %.100q is not a string", tensor))
			}
			entries++
			if err := call(tensor.(string), name); err != nil {
				return err
			}
		}
		if _, err := decoder.Token(); err != nil {
			return invalid(err)
		}
	}
	if _, err := decoder.Token(); err != nil {
		return invalid(err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return invalid(errors.New("text after the JSON object"))
	}
	if entries == 0 {
		return Invalidf("%s: weight_map is missing or empty", path)
	}
	return nil
}

// skippedValue is a JSON value that is skipped.
type skippedValue struct{}

// UnmarshalJSON accepts any value.
func (*skippedValue) UnmarshalJSON([]byte) error { return nil }

// openShards opens the files listed in the index, or all weight files if there is no index. It compares the index with
// the shards and computes the digest. Each part of the digest is framed with its length, so two different checkpoints
// never have the same byte stream.
func (c *Checkpoint) openShards() error {
	var index []byte
	files := map[string]bool{}
	if c.IndexName == "" {
		names, err := unindexedShards(c.Dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			files[name] = true
		}
	} else {
		var err error
		if index, err = c.ReadIndex(); err != nil {
			return err
		}
		if err := c.eachIndexed(index, func(tensor, file string) error {
			files[file] = true
			return c.checkFile(tensor, file)
		}); err != nil {
			return err
		}
	}
	h := sha256.New()
	frame(h, c.ConfigText)
	frame(h, index)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := c.openShard(name, h); err != nil {
			return err
		}
	}
	c.digest = hex.EncodeToString(h.Sum(nil))
	if c.IndexName == "" {
		return nil
	}
	return c.compareIndex(index)
}

// openShard opens a shard and adds it to the digest. The text of its header is not kept, because it takes more memory
// than the parsed header.
func (c *Checkpoint) openShard(name string, h hash.Hash) error {
	frame(h, []byte(name))
	shard, err := openFile(filepath.Join(c.Dir, name), h)
	if err != nil {
		return err
	}
	c.Shards = append(c.Shards, shard)
	for tensor := range shard.Tensors {
		if other, twice := c.shardOf[tensor]; twice {
			return Invalidf("tensor %q is in both %s and %s: keep only the files of one checkpoint, or add its index", tensor, other.Path, shard.Path)
		}
		c.shardOf[tensor] = shard
	}
	frame(h, binary.LittleEndian.AppendUint64(nil, uint64(shard.Size)))
	return nil
}

// compareIndex requires that index and shards list the same tensors in the same files.
func (c *Checkpoint) compareIndex(index []byte) error {
	const different = "index and shards belong to different checkpoints"
	places := map[string]string{} // file by tensor, for tensors that are not in the listed file
	placed := 0
	// The sums of the hashes differ if the index lists a tensor twice and another one not at all.
	seed, sum := maphash.MakeSeed(), uint64(0)
	if err := c.eachIndexed(index, func(tensor, file string) error {
		if shard, found := c.shardOf[tensor]; !found || shard.Name() != file {
			places[tensor] = file
			return nil
		}
		placed++
		sum += maphash.String(seed, tensor)
		return nil
	}); err != nil {
		return err
	}
	for tensor := range c.shardOf {
		sum -= maphash.String(seed, tensor)
	}
	if len(places) > 0 {
		tensor := slices.Min(slices.Collect(maps.Keys(places))) // deterministic choice
		file := places[tensor]
		if shard, found := c.shardOf[tensor]; found {
			return Invalidf("%s contains tensor %q, which %s does not list in this file: %s", shard.Path, tensor, c.IndexName, different)
		}
		if err := c.unindexed(index); err != nil {
			return err
		}
		return Invalidf("%s does not contain tensor %q, which %s lists in this file: %s", filepath.Join(c.Dir, file), tensor, c.IndexName, different)
	}
	if placed != len(c.shardOf) || sum != 0 {
		return c.unindexed(index)
	}
	return nil
}

// unindexed returns an error that names a tensor that the index lists twice or not at all, or nil if there is none.
func (c *Checkpoint) unindexed(index []byte) error {
	left := maps.Clone(c.shardOf)
	if err := c.eachIndexed(index, func(tensor, _ string) error {
		if _, isLeft := left[tensor]; !isLeft && c.shardOf[tensor] != nil {
			return Invalidf("%s lists tensor %q twice", c.listing(), tensor)
		}
		delete(left, tensor)
		return nil
	}); err != nil {
		return err
	}
	if len(left) > 0 {
		tensor := slices.Min(slices.Collect(maps.Keys(left)))
		return Invalidf("%s contains tensor %q, which %s does not list in this file: index and shards belong to different checkpoints",
			left[tensor].Path, tensor, c.IndexName)
	}
	return nil
}

func frame(h hash.Hash, part []byte) {
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(part))))
	h.Write(part)
}

// readSmallFile reads a JSON file of at most maxJSONBytes.
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
	for _, check := range []func([]byte) error{checkPlaceholder, checkEncoding} {
		if err := check(text); err != nil {
			return nil, Invalidf("%s %s %v", what, path, err)
		}
	}
	return text, nil
}

// ReadJSON reads another JSON file of the checkpoint into value. found is false if the file does not exist.
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
