// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
)

const (
	// format is the version of bundle.json.
	format = "semmoe-bundle/1"
	// File is the name of the list of the files of a bundle, in the store and in a directory of Fetch.
	File = plan.BundleFile
	// TokenizerFile is the tokenizer of the checkpoint, if the profile has one.
	TokenizerFile = plan.TokenizerFile

	// maxListBytes bounds a list. A list contains about ten files.
	maxListBytes = 64 << 10
)

// list is the content of bundle.json.
type list struct {
	Format     string                     `json:"format"`
	PlanDigest artifact.Digest            `json:"planDigest"`
	Files      map[string]artifact.Digest `json:"files"`
}

// Scope returns the scope of a plan in the store. planDigest is its full digest.
func Scope(namespace, planDigest string) (artifact.Scope, error) {
	digest, err := artifact.ParseDigest(planDigest)
	if err != nil {
		return artifact.Scope{}, fmt.Errorf("plan digest: %w", err)
	}
	scope := artifact.Scope{Namespace: namespace, Kind: artifact.Plan, ID: digest.Short()}
	return scope, scope.Validate()
}

// Publish stores a plan, and the tokenizer of its tables unless it is nil. Publishing a plan again is a no-op, except
// that missing files are stored.
func Publish(ctx context.Context, client *access.Client, namespace string, a *plan.Artifact, tokenizer io.Reader) error {
	scope, err := Scope(namespace, a.Digest)
	if err != nil {
		return err
	}
	l := list{Format: format, PlanDigest: artifact.Digest(a.Digest), Files: map[string]artifact.Digest{}}
	for _, name := range slices.Sorted(maps.Keys(a.Files)) {
		if l.Files[name], err = client.Put(ctx, scope, bytes.NewReader(a.Files[name])); err != nil {
			return fmt.Errorf("failed to store %s of plan %s: %w", name, scope.ID, err)
		}
	}
	if tokenizer != nil {
		if l.Files[TokenizerFile], err = client.Put(ctx, scope, tokenizer); err != nil {
			return fmt.Errorf("failed to store %s of plan %s: %w", TokenizerFile, scope.ID, err)
		}
	}
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	digest, err := client.Put(ctx, scope, bytes.NewReader(text))
	if err == nil {
		_, err = client.Publish(ctx, scope, digest)
	}
	if err != nil {
		return fmt.Errorf("failed to store %s of plan %s: %w", File, scope.ID, err)
	}
	return nil
}

// Complete reports whether the store contains a plan with all its files. A damaged list counts as missing, because the
// store deletes damaged files.
func Complete(ctx context.Context, client *access.Client, namespace, planDigest string) (bool, error) {
	scope, err := Scope(namespace, planDigest)
	if err != nil {
		return false, err
	}
	l, _, err := readList(ctx, client, scope, planDigest)
	if errors.Is(err, artifact.ErrNotFound) || errors.Is(err, artifact.ErrCorrupt) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	present, err := client.List(ctx, scope)
	if err != nil {
		return false, err
	}
	for _, digest := range l.Files {
		if !slices.ContainsFunc(present, func(a artifact.Artifact) bool { return a.Digest == digest }) {
			return false, nil
		}
	}
	return true, nil
}

// readList reads and parses the list of the files of a plan. It also returns the text of the list.
func readList(ctx context.Context, client *access.Client, scope artifact.Scope, planDigest string) (list, []byte, error) {
	digest, err := client.Published(ctx, scope)
	if err != nil {
		return list{}, nil, fmt.Errorf("failed to read plan %s: %w", scope.ID, err)
	}
	text, err := client.ReadAll(ctx, scope, digest, maxListBytes)
	if err != nil {
		return list{}, nil, fmt.Errorf("failed to read %s of plan %s: %w", File, scope.ID, err)
	}
	l, err := parseList(text, planDigest)
	return l, text, err
}

// parseList parses the list of a plan, and validates the names, which become paths below a directory.
func parseList(text []byte, planDigest string) (list, error) {
	var l list
	if err := json.Unmarshal(text, &l); err != nil {
		return l, fmt.Errorf("%s: %w", File, err)
	}
	switch {
	case l.Format != format:
		return l, fmt.Errorf("%s: format is %q; this version reads %q", File, l.Format, format)
	case string(l.PlanDigest) != planDigest:
		return l, fmt.Errorf("%s is the list of plan %s, want plan %s", File, l.PlanDigest, planDigest)
	case l.Files[plan.ManifestFile] != l.PlanDigest:
		return l, fmt.Errorf("%s: %s has sha256 %q, want the plan digest %s", File, plan.ManifestFile, l.Files[plan.ManifestFile], planDigest)
	}
	for name, digest := range l.Files {
		if _, err := artifact.ParseDigest(string(digest)); err != nil {
			return l, fmt.Errorf("%s: %s: %w", File, name, err)
		}
		if !filepath.IsLocal(name) || name != filepath.Clean(name) || name == "." || name == File {
			return l, fmt.Errorf("%s: %q is not a valid file name", File, name)
		}
	}
	return l, nil
}
