// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// manifestFile is the name of the file in the output that describes the inputs and the content of the output.
const manifestFile = "semmoe-reshuffle.json"

// Format is the version of the manifest and of the output format.
const Format = "semmoe-reshuffle/1"

// Manifest is the content of manifestFile. It contains no time and no path, so the same input gives the same bytes. The
// only exception are the hashes of whole shards, which only a verified run computes.
type Manifest struct {
	Format string `json:"format"`
	Source Source `json:"source"`
	// PermutationDigest and Permutation describe how the source was permuted. Unchanged layers are not listed.
	PermutationDigest string      `json:"permutation_digest"`
	Permutation       Permutation `json:"permutation"`
	// ModelDigest identifies the output. See checkpoint.Checkpoint.Digest.
	ModelDigest string           `json:"model_digest"`
	Shards      map[string]Shard `json:"shards"`
	// Files maps every other file except the manifest to its sha256. The value is empty while the file is being
	// replaced.
	Files map[string]string `json:"files"`
	// LeftOut lists the files of the source that the output does not contain: files that hold weights in another
	// format, which would be in the old order, directories that cannot be read, and entries that are neither files nor
	// directories.
	LeftOut []string `json:"left_out,omitempty"`
}

// Source identifies the input.
type Source struct {
	// ModelDigest is checkpoint.Checkpoint.Digest of the input: config, index and headers.
	ModelDigest string `json:"model_digest"`
	// SampleDigest is the sha256 of samples of the weights. It distinguishes models of the same layout.
	SampleDigest string `json:"sample_digest"`
}

// Shard describes a shard of the output.
type Shard struct {
	Size int64 `json:"size"`
	// HeaderSHA256 is the sha256 of the header's length and text.
	HeaderSHA256 string `json:"header_sha256"`
	// Gathered maps each tensor with moved rows to its sha256. Tensors larger than 16 MiB are not included.
	Gathered map[string]string `json:"gathered,omitempty"`
	// SHA256 is the sha256 of the whole file. It is set only after full verification.
	SHA256 string `json:"sha256,omitempty"`
}

const (
	// sampleBytes is the number of bytes read at the beginning of each sampled tensor.
	sampleBytes = 4096
	// expertSamples is the maximum number of expert tensors sampled in a shard. All other tensors are sampled: there
	// are few.
	expertSamples = 8
)

// identify samples the weights of the input. Two checkpoints that differ only outside of the samples get the same
// digest.
func identify(c *checkpoint.Checkpoint) (Source, error) {
	h := sha256.New()
	buffer := make([]byte, sampleBytes)
	for _, shard := range c.Shards {
		var experts, sampled []string
		for _, name := range shard.Names() {
			if c.Config.Classify(name).Role == checkpoint.Expert {
				experts = append(experts, name)
			} else {
				sampled = append(sampled, name)
			}
		}
		for i, n := 0, min(expertSamples, len(experts)); i < n; i++ {
			sampled = append(sampled, experts[i*len(experts)/n])
		}
		for _, name := range sampled {
			tensor := shard.Tensors[name]
			part := buffer[:min(tensor.End-tensor.Begin, sampleBytes)]
			if err := readFull(shard.Handle(), part, shard.DataStart()+tensor.Begin); err != nil {
				return Source{}, err
			}
			h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(part))))
			h.Write(part)
		}
	}
	return Source{c.Digest(), hex.EncodeToString(h.Sum(nil))}, nil
}

// identity returns the digest that identifies a combination of source and permutation.
func identity(source Source, permutationDigest string) string {
	return digest([]byte(Format + "\n" + source.ModelDigest + "\n" + source.SampleDigest + "\n" + permutationDigest + "\n"))
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// maxManifestBytes is the maximum size of a manifest. The manifest of the largest known models has 2 MB.
const maxManifestBytes = 64 << 20

// openRegular opens a regular file. In a shared directory, another user may replace the file with a FIFO, and a
// blocking open would hang.
func openRegular(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		file.Close()
		return nil, cmp.Or(err, checkpoint.Invalidf("%s is not a regular file", path))
	}
	return file, nil
}

// readManifest reads the manifest of an output. found is false if there is none.
func readManifest(dir string) (m *Manifest, found bool, err error) {
	file, err := openRegular(filepath.Join(dir, manifestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxManifestBytes+1))
	if err != nil {
		return nil, false, err
	}
	if len(text) > maxManifestBytes {
		return nil, true, checkpoint.Invalidf("%s has more than %d bytes", file.Name(), maxManifestBytes)
	}
	m = &Manifest{}
	if err := json.Unmarshal(text, m); err != nil {
		return nil, true, checkpoint.Invalidf("%s: %v", filepath.Join(dir, manifestFile), err)
	}
	return m, true, nil
}

// encode returns the manifest as JSON.
func (m *Manifest) encode() ([]byte, error) {
	text, err := json.Marshal(m)
	return append(text, '\n'), err
}

func (m *Manifest) write(dir string) error {
	text, err := m.encode()
	if err != nil {
		return err
	}
	return writeText(filepath.Join(dir, manifestFile), text)
}

// save updates the manifest of a published output.
func (m *Manifest) save(dir string) error {
	if err := m.write(dir); err != nil {
		return err
	}
	return syncDirectory(dir)
}

// check compares the names, sizes and hashes of an output with its manifest. Of the shards, only headers and gathered
// tensors are hashed.
func (m *Manifest) check(dir string) error {
	for _, name := range slices.Sorted(maps.Keys(m.Shards)) {
		if err := m.Shards[name].check(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		path := filepath.Join(dir, name)
		sum, err := hashFile(path)
		if err != nil {
			return missingError(path, err)
		}
		if sum != m.Files[name] {
			return checkpoint.Invalidf("%s is damaged: its sha256 is %s, the manifest lists %s", path, sum, m.Files[name])
		}
	}
	return nil
}

func (s Shard) check(path string) error {
	file, err := checkpoint.OpenFile(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if file.Size != s.Size || digest(checkpoint.FrameHeader(file.HeaderText)) != s.HeaderSHA256 {
		return checkpoint.Invalidf("%s is damaged: its size or its header differs from the manifest", path)
	}
	for name, want := range s.Gathered {
		tensor := file.Tensors[name]
		h := sha256.New()
		if err := hashRange(h, file.Handle(), file.DataStart()+tensor.Begin, tensor.End-tensor.Begin); err != nil {
			return err
		}
		if got := hex.EncodeToString(h.Sum(nil)); got != want {
			return checkpoint.Invalidf("%s is damaged: tensor %q has sha256 %s, the manifest lists %s", path, name, got, want)
		}
	}
	return nil
}

// missingError turns the error of a missing file, which is permanent, into an InvalidError. Other read errors are
// returned unchanged, because they may be temporary.
func missingError(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return checkpoint.Invalidf("%s is missing", path)
	}
	return err
}

func hashFile(path string) (string, error) {
	file, err := openRegular(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	if err := hashRange(h, file, 0, info.Size()); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// describe returns the manifest's entry of a finished shard.
func (p *shardPlan) describe(path, sum string) (Shard, error) {
	gathered, err := p.hashGathers(path)
	if err != nil {
		return Shard{}, err
	}
	return Shard{p.size(), digest(checkpoint.FrameHeader(p.header)), gathered, sum}, nil
}

// mismatch describes why an existing output was not made from the same inputs. It returns an empty string if the output
// matches.
func (m *Manifest) mismatch(source Source, p *Permutation) string {
	var why bytes.Buffer
	if m.Format != Format {
		fmt.Fprintf(&why, "its format is %q, this version writes %q", m.Format, Format)
	} else if m.Source != source {
		fmt.Fprintf(&why, "it was made from another model (digest %.16s, expected %.16s)", m.Source.ModelDigest, source.ModelDigest)
	} else if m.PermutationDigest != p.Digest() {
		fmt.Fprintf(&why, "it has another permutation (digest %.16s, expected %.16s)", m.PermutationDigest, p.Digest())
	}
	return why.String()
}
