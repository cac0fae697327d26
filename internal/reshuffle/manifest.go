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

	"github.com/semmoe/operator/internal/checkpoint"
)

// ManifestFile is the file of the output that says what it was made of.
const ManifestFile = "semmoe-reshuffle.json"

// Format is the version of the manifest and of what this package writes.
const Format = "semmoe-reshuffle/1"

// Manifest is the content of ManifestFile. It holds no time and no path: the same input gives the same bytes, but for the
// shards' full hashes, which only a verified run knows.
type Manifest struct {
	Format string `json:"format"`
	Source Source `json:"source"`
	// PermutationDigest and Permutation are what was done to the source; layers that stayed are not listed.
	PermutationDigest string      `json:"permutation_digest"`
	Permutation       Permutation `json:"permutation"`
	// ModelDigest identifies the output, see checkpoint.Checkpoint.Digest.
	ModelDigest string           `json:"model_digest"`
	Shards      map[string]Shard `json:"shards"`
	// Files holds the sha256 of every other file but the manifest; empty for one that is being replaced.
	Files map[string]string `json:"files"`
	// LeftOut lists what the output has not: files of the source that hold weights in another form, which would be in the old order,
	// directories that cannot be read, and what is neither file nor directory.
	LeftOut []string `json:"left_out,omitempty"`
}

// Source identifies the input.
type Source struct {
	// ModelDigest is checkpoint.Checkpoint.Digest: config, index and headers.
	ModelDigest string `json:"model_digest"`
	// SampleDigest is a sha256 of samples of the weights: it tells models of the same layout apart.
	SampleDigest string `json:"sample_digest"`
}

// Shard describes a shard of the output.
type Shard struct {
	Size int64 `json:"size"`
	// HeaderSHA256 is that of the header's length and text.
	HeaderSHA256 string `json:"header_sha256"`
	// Gathered holds the sha256 of the tensors whose rows moved, of those of at most 16 MiB.
	Gathered map[string]string `json:"gathered,omitempty"`
	// SHA256 is that of the whole file, where the output was verified in full.
	SHA256 string `json:"sha256,omitempty"`
}

const (
	// sampleBytes is read at the beginning of each sampled tensor.
	sampleBytes = 4096
	// expertSamples is how many tensors of experts are sampled in a shard. All other tensors are sampled: there are few.
	expertSamples = 8
)

// identify samples the weights of the input. Two checkpoints that differ only outside of the samples share a digest.
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

// identity names the work: what is made of what.
func identity(source Source, permutationDigest string) string {
	return digest([]byte(Format + "\n" + source.ModelDigest + "\n" + source.SampleDigest + "\n" + permutationDigest + "\n"))
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// maxManifestBytes bounds a manifest; that of the largest known models has 2 MB.
const maxManifestBytes = 64 << 20

// openRegular opens a regular file. In a directory that users share, another one may put a FIFO in its place, which would block.
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

// readManifest reads the manifest of an output; found is false where there is none.
func readManifest(dir string) (m *Manifest, found bool, err error) {
	file, err := openRegular(filepath.Join(dir, ManifestFile))
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
		return nil, true, checkpoint.Invalidf("%s: %v", filepath.Join(dir, ManifestFile), err)
	}
	return m, true, nil
}

// encode is the manifest's text.
func (m *Manifest) encode() ([]byte, error) {
	text, err := json.Marshal(m)
	return append(text, '\n'), err
}

func (m *Manifest) write(dir string) error {
	text, err := m.encode()
	if err != nil {
		return err
	}
	return writeText(filepath.Join(dir, ManifestFile), text)
}

// save changes the manifest of an output that has its name.
func (m *Manifest) save(dir string) error {
	if err := m.write(dir); err != nil {
		return err
	}
	return syncDirectory(dir)
}

// check compares the files of an output with its manifest: names, sizes, and the hash of all that was not merely copied.
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
			return damaged(path, err)
		}
		if sum != m.Files[name] {
			return checkpoint.Invalidf("%s is damaged: its sha256 is %s, the manifest has %s", path, sum, m.Files[name])
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
		return checkpoint.Invalidf("%s is damaged: it has not the size or the header that the manifest has", path)
	}
	for name, want := range s.Gathered {
		tensor := file.Tensors[name]
		h := sha256.New()
		if err := hashRange(h, file.Handle(), file.DataStart()+tensor.Begin, tensor.End-tensor.Begin); err != nil {
			return err
		}
		if got := hex.EncodeToString(h.Sum(nil)); got != want {
			return checkpoint.Invalidf("%s is damaged: tensor %q has sha256 %s, the manifest has %s", path, name, got, want)
		}
	}
	return nil
}

// damaged tells a missing file, which stays missing, from one that cannot be read now.
func damaged(path string, err error) error {
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

// describe makes the manifest's entry of a finished shard.
func (p *shardPlan) describe(path, sum string) (Shard, error) {
	gathered, err := p.hashGathers(path)
	if err != nil {
		return Shard{}, err
	}
	return Shard{p.size(), digest(checkpoint.FrameHeader(p.header)), gathered, sum}, nil
}

// sameWork tells why an existing output is not what would be made; empty where it is.
func (m *Manifest) sameWork(source Source, p *Permutation) string {
	var why bytes.Buffer
	if m.Format != Format {
		fmt.Fprintf(&why, "it was written in format %q, this version writes %q", m.Format, Format)
	} else if m.Source != source {
		fmt.Fprintf(&why, "it was made of another model (digest %.16s, this one has %.16s)", m.Source.ModelDigest, source.ModelDigest)
	} else if m.PermutationDigest != p.Digest() {
		fmt.Fprintf(&why, "it has another permutation (digest %.16s, this one has %.16s)", m.PermutationDigest, p.Digest())
	}
	return why.String()
}
