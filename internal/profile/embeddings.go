// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/model/embeddings"
	"github.com/semmoe/operator/internal/model/npy"
	"github.com/semmoe/operator/solver/embedding"
)

// MaxNoEmbeddings is the maximum length of Manifest.NoEmbeddings, and of the same field in the status of an
// AffinityProfile.
const MaxNoEmbeddings = 250

// CreateEmbeddings extracts the token embeddings of a checkpoint to the file EmbeddingsFile of dir, and returns its
// path. If they cannot be extracted, it returns the reason instead, because a profile is complete without them. err is
// only an error of ctx.
func CreateEmbeddings(ctx context.Context, dir, model, layoutAs string) (path, reason string, err error) {
	path = filepath.Join(dir, EmbeddingsFile)
	vectors, err := embeddings.Extract(ctx, model, layoutAs)
	if err == nil {
		err = writeMatrix(path, vectors)
	}
	switch {
	case ctx.Err() != nil:
		return "", "", ctx.Err()
	case err != nil:
		text := strings.ReplaceAll(err.Error(), filepath.Clean(model)+"/", "")
		return "", printable.Line(text, MaxNoEmbeddings), nil
	}
	return path, "", nil
}

func writeMatrix(path string, m *npy.Matrix) (err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return npy.WriteFloat16(file, m)
}

// EmbeddingsError reports token embeddings in the artifact store that a vocabulary does not match, or that cannot be
// parsed.
type EmbeddingsError struct{ Cause error }

func (e *EmbeddingsError) Error() string {
	return "failed to read the token embeddings: " + e.Cause.Error()
}

func (e *EmbeddingsError) Unwrap() error { return e.Cause }

// FetchEmbeddings reads the token embeddings of a profile. It returns nil if the profile has none.
func FetchEmbeddings(ctx context.Context, store *access.Client, scope artifact.Scope, m Manifest, vocabulary int) (*embedding.Table, error) {
	digest, has := m.Files[EmbeddingsFile]
	if !has {
		return nil, nil
	}
	content, err := store.ReadAll(ctx, scope, digest, embeddings.MaxBytes)
	if err != nil {
		return nil, fmt.Errorf("failed to read the token embeddings of %s: %w", scope, err)
	}
	vectors, err := npy.Read(bytes.NewReader(content), int64(len(content)))
	switch {
	case err != nil:
		return nil, &EmbeddingsError{err}
	case vectors.Rows != vocabulary || vectors.Columns > embeddings.Dimensions:
		return nil, &EmbeddingsError{fmt.Errorf("shape (%d, %d) is invalid: want (%d, 1 to %d)", vectors.Rows, vectors.Columns, vocabulary, embeddings.Dimensions)}
	}
	return &embedding.Table{Tokens: vectors.Rows, Size: vectors.Columns, Values: vectors.Values}, nil
}
