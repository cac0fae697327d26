package profile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/semmoe/operator/internal/artifact"
)

// Format is the format of a profile in the artifact store. A change of what is recorded for the same inputs changes it.
const Format = "semmoe-profile/1"

// The files of a profile: the routing trace, unless it is of live counts, the counts over all recorded tokens, and the tokenizer
// of the checkpoint where it has one. The result of the profile's scope is a Manifest, which names them.
const (
	TraceFile     = "trace.safetensors.zst"
	CountsFile    = "counts.safetensors.zst"
	TokenizerFile = "tokenizer.json"
)

// maxManifestBytes bounds a manifest, which is well below a kilobyte.
const maxManifestBytes = 1 << 20

// Sampling is how much of a data set is recorded.
type Sampling struct {
	// Requests is how many requests are sent at most: a uniform sample of the data set.
	Requests int `json:"requests"`
	// Tokens is how many tokens are recorded at most, but for the last request.
	Tokens int `json:"tokens"`
	// RequestTokens is how many tokens of a prompt are sent at most.
	RequestTokens int `json:"requestTokens"`
}

// inputs are what a profile depends on. Neither images nor versions nor resources are among them: an upgrade must not
// cost a device.
type inputs struct {
	Format        string `json:"format"`
	ModelDigest   string `json:"modelDigest"`
	DatasetDigest string `json:"datasetDigest"`
	Sampling
}

// ID names the profile of these inputs: the first 16 hexadecimal characters of a sha256. It is the ID of the profile's
// scope in the artifact store.
func ID(modelDigest, datasetDigest string, s Sampling) string {
	text, err := json.Marshal(inputs{Format, modelDigest, datasetDigest, s})
	if err != nil {
		panic(err) // strings and integers always marshal
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])[:16]
}

// Manifest is the result of a profile's scope: what was profiled, what came out, and the files.
type Manifest struct {
	Format        string   `json:"format"`
	ModelDigest   string   `json:"modelDigest"`
	DatasetDigest string   `json:"datasetDigest"`
	Sampling      Sampling `json:"sampling"`
	Summary       Summary  `json:"summary"`
	// Live tells of a profile that was made from samples of live traffic; nil for one of a data set, whose digest stands above.
	Live *Live `json:"live,omitempty"`
	// Files holds the digest of each file by its name.
	Files map[string]artifact.Digest `json:"files"`
}

// ID names the profile that the manifest is about.
func (m Manifest) ID() string {
	if m.Live != nil {
		return LiveID(m.Live.UID)
	}
	return ID(m.ModelDigest, m.DatasetDigest, m.Sampling)
}

// HasTrace tells that the profile has a routing trace: one of live counts has none.
func (m Manifest) HasTrace() bool { return m.Files[TraceFile] != "" }

// validate tells what is wrong with the manifest of a scope.
func (m Manifest) validate(scope artifact.Scope) error {
	switch {
	case m.Format != Format:
		return fmt.Errorf("its format is %q; this version reads %q", m.Format, Format)
	case m.ID() != scope.ID:
		return fmt.Errorf("it is about the inputs %s", m.ID())
	}
	required := []string{TraceFile, CountsFile}
	if m.Live != nil && m.Live.Samples == LiveCounts {
		required = required[1:]
	}
	for _, name := range required {
		if m.Files[name] == "" {
			return fmt.Errorf("it names no %s", name)
		}
	}
	for name, digest := range m.Files {
		if _, err := artifact.ParseDigest(string(digest)); err != nil {
			return fmt.Errorf("file %s: %w", name, err)
		}
	}
	return nil
}

// FetchManifest reads the manifest with a digest, as Published of the scope returned it.
func FetchManifest(ctx context.Context, store *artifact.Client, scope artifact.Scope, digest artifact.Digest) (Manifest, error) {
	reader, err := store.Get(ctx, scope, digest)
	if err != nil {
		return Manifest{}, err
	}
	defer reader.Close()
	text, err := io.ReadAll(io.LimitReader(reader, maxManifestBytes+1))
	if err != nil {
		return Manifest{}, err
	}
	if len(text) > maxManifestBytes {
		return Manifest{}, fmt.Errorf("the manifest of %s is larger than %d bytes", scope, maxManifestBytes)
	}
	var m Manifest
	if err := json.Unmarshal(text, &m); err != nil {
		return Manifest{}, fmt.Errorf("the manifest of %s: %w", scope, err)
	}
	if err := m.validate(scope); err != nil {
		return Manifest{}, fmt.Errorf("the manifest of %s: %w", scope, err)
	}
	return m, nil
}

// Publish stores the files, given by name and path, and then the manifest, which is completed with their digests, as the
// result of the scope. It returns the digest of the result that the scope has then: the first one that was published.
func Publish(ctx context.Context, store *artifact.Client, scope artifact.Scope, m Manifest, files map[string]string) (artifact.Digest, error) {
	m.Files = map[string]artifact.Digest{}
	for name, path := range files {
		digest, err := putFile(ctx, store, scope, path)
		if err != nil {
			return "", fmt.Errorf("store %s: %w", name, err)
		}
		m.Files[name] = digest
	}
	return publish(ctx, store, scope, m)
}

// publish stores the manifest, whose files are stored, as the result of the scope.
func publish(ctx context.Context, store *artifact.Client, scope artifact.Scope, m Manifest) (artifact.Digest, error) {
	m.Format = Format
	m.Summary.Seconds = 0 // the same profile is the same bytes, and has the same digest
	if err := m.validate(scope); err != nil {
		return "", fmt.Errorf("the manifest for %s: %w", scope, err)
	}
	text, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	digest, err := store.Put(ctx, scope, bytes.NewReader(text))
	if err != nil {
		return "", fmt.Errorf("store the manifest: %w", err)
	}
	won, err := store.Publish(ctx, scope, digest)
	if err != nil {
		return "", fmt.Errorf("publish the profile: %w", err)
	}
	return won, nil
}

func putFile(ctx context.Context, store *artifact.Client, scope artifact.Scope, path string) (digest artifact.Digest, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return store.Put(ctx, scope, file)
}
