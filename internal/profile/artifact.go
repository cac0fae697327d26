// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/internal/artifact/access"
)

// Format is the format of a profile in the artifact store. It changes whenever the recorded data of the same inputs
// changes.
const Format = "semmoe-profile/1"

// The files of a profile: the routing trace (not with live counts), the counts over all recorded tokens, and the
// tokenizer and the token embeddings of the checkpoint if it has some that can be read. The result of the scope of the
// profile is a Manifest that lists them.
const (
	TraceFile      = "trace.safetensors.zst"
	CountsFile     = "counts.safetensors.zst"
	TokenizerFile  = "tokenizer.json"
	EmbeddingsFile = "embeddings.npy"
)

// maxManifestBytes bounds a manifest. Manifests are well below one kilobyte.
const maxManifestBytes = 1 << 20

// Sampling limits how much of a data set is recorded.
type Sampling struct {
	// Requests is the maximum number of requests to send: a uniform sample of the data set.
	Requests int `json:"requests"`
	// Tokens is the maximum number of tokens to record. The last request may exceed it.
	Tokens int `json:"tokens"`
	// RequestTokens is the maximum number of tokens of a prompt.
	RequestTokens int `json:"requestTokens"`
}

// inputs are the inputs of a profile. They contain no images, versions or resources, so that an upgrade does not repeat
// a profile.
type inputs struct {
	Format        string `json:"format"`
	ModelDigest   string `json:"modelDigest"`
	DatasetDigest string `json:"datasetDigest"`
	Sampling
}

// ID returns the ID of the profile of these inputs: the first 16 hexadecimal characters of a sha256. It is the ID of
// the scope of the profile in the artifact store.
func ID(modelDigest, datasetDigest string, s Sampling) string {
	text, err := json.Marshal(inputs{Format, modelDigest, datasetDigest, s})
	if err != nil {
		panic(err) // strings and integers always marshal
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])[:16]
}

// Manifest is the result of the scope of a profile: the inputs, a summary, and the files.
type Manifest struct {
	Format        string   `json:"format"`
	ModelDigest   string   `json:"modelDigest"`
	DatasetDigest string   `json:"datasetDigest"`
	Sampling      Sampling `json:"sampling"`
	Summary       Summary  `json:"summary"`
	// Live is set for a profile that was made from samples of live traffic; nil for a profile of a data set.
	Live *Live `json:"live,omitempty"`
	// NoEmbeddings is the reason why the profile has no EmbeddingsFile. It is empty if the profile has one, or if an
	// earlier version recorded it.
	NoEmbeddings string `json:"noEmbeddings,omitempty"`
	// Files contains the digest of each file by name.
	Files map[string]artifact.Digest `json:"files"`
}

// ID returns the ID of the profile of the manifest.
func (m Manifest) ID() string {
	if m.Live != nil {
		return LiveID(m.Live.UID)
	}
	return ID(m.ModelDigest, m.DatasetDigest, m.Sampling)
}

// HasTrace reports whether the profile has a routing trace. A profile of live counts has none.
func (m Manifest) HasTrace() bool { return m.Files[TraceFile] != "" }

// validate returns an error if the manifest does not belong to the scope or lacks a file.
func (m Manifest) validate(scope artifact.Scope) error {
	switch {
	case m.Format != Format:
		return fmt.Errorf("format: %q is invalid: this version reads %q", m.Format, Format)
	case m.ID() != scope.ID:
		return fmt.Errorf("the inputs have the ID %s", m.ID())
	}
	required := []string{TraceFile, CountsFile}
	if m.Live != nil && m.Live.Samples == LiveCounts {
		required = required[1:]
	}
	for _, name := range required {
		if m.Files[name] == "" {
			return fmt.Errorf("it lists no file %s", name)
		}
	}
	for name, digest := range m.Files {
		if _, err := artifact.ParseDigest(string(digest)); err != nil {
			return fmt.Errorf("file %s: %w", name, err)
		}
	}
	return nil
}

// FetchManifest reads the manifest with a digest that Published of the scope returned.
func FetchManifest(ctx context.Context, store *access.Client, scope artifact.Scope, digest artifact.Digest) (Manifest, error) {
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
		return Manifest{}, fmt.Errorf("failed to read the manifest of %s: %w", scope, err)
	}
	if err := m.validate(scope); err != nil {
		return Manifest{}, fmt.Errorf("failed to read the manifest of %s: %w", scope, err)
	}
	return m, nil
}

// Publish stores the files, given by name and path, completes the manifest with their digests, and publishes it as the
// result of the scope. It returns the digest of the result of the scope: the result that was published first.
func Publish(ctx context.Context, store *access.Client, scope artifact.Scope, m Manifest, files map[string]string) (artifact.Digest, error) {
	m.Files = map[string]artifact.Digest{}
	for name, path := range files {
		digest, err := putFile(ctx, store, scope, path)
		if err != nil {
			return "", fmt.Errorf("failed to store %s: %w", name, err)
		}
		m.Files[name] = digest
	}
	return publish(ctx, store, scope, m)
}

// publish publishes the manifest as the result of the scope. Its files are already stored.
func publish(ctx context.Context, store *access.Client, scope artifact.Scope, m Manifest) (artifact.Digest, error) {
	m.Format = Format
	m.Summary.Seconds = 0 // the duration is not stored, so that the same profile has the same digest
	if err := m.validate(scope); err != nil {
		return "", fmt.Errorf("invalid manifest for %s: %w", scope, err)
	}
	text, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	digest, err := store.Put(ctx, scope, bytes.NewReader(text))
	if err != nil {
		return "", fmt.Errorf("failed to store the manifest: %w", err)
	}
	won, err := store.Publish(ctx, scope, digest)
	if err != nil {
		return "", fmt.Errorf("failed to publish the profile: %w", err)
	}
	return won, nil
}

func putFile(ctx context.Context, store *access.Client, scope artifact.Scope, path string) (digest artifact.Digest, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return store.Put(ctx, scope, file)
}
