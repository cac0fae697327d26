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
	"github.com/semmoe/operator/internal/plan"
)

const (
	// Format is the version of bundle.json.
	Format = "semmoe-bundle/1"
	// File is the name of the list of a bundle's files, also in a directory that Fetch has made.
	File = plan.BundleFile
	// TokenizerFile is the checkpoint's tokenizer, where the profile has one.
	TokenizerFile = plan.TokenizerFile

	// maxListBytes bounds what is read of a list: it names about ten files.
	maxListBytes = 64 << 10
)

// list is the content of bundle.json.
type list struct {
	Format     string                     `json:"format"`
	PlanDigest artifact.Digest            `json:"planDigest"`
	Files      map[string]artifact.Digest `json:"files"`
}

// Scope is where a plan lies in the store; planDigest is its full digest.
func Scope(namespace, planDigest string) (artifact.Scope, error) {
	digest, err := artifact.ParseDigest(planDigest)
	if err != nil {
		return artifact.Scope{}, fmt.Errorf("plan digest: %w", err)
	}
	scope := artifact.Scope{Namespace: namespace, Kind: artifact.Plan, ID: digest.Short()}
	return scope, scope.Validate()
}

// Publish stores a plan, with the tokenizer that its tables are for unless that is nil. To publish a plan again is no
// error, and stores what is missing of it.
func Publish(ctx context.Context, client *artifact.Client, namespace string, a *plan.Artifact, tokenizer io.Reader) error {
	scope, err := Scope(namespace, a.Digest)
	if err != nil {
		return err
	}
	l := list{Format: Format, PlanDigest: artifact.Digest(a.Digest), Files: map[string]artifact.Digest{}}
	for _, name := range slices.Sorted(maps.Keys(a.Files)) {
		if l.Files[name], err = client.Put(ctx, scope, bytes.NewReader(a.Files[name])); err != nil {
			return fmt.Errorf("store %s of plan %s: %w", name, scope.ID, err)
		}
	}
	if tokenizer != nil {
		if l.Files[TokenizerFile], err = client.Put(ctx, scope, tokenizer); err != nil {
			return fmt.Errorf("store %s of plan %s: %w", TokenizerFile, scope.ID, err)
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
		return fmt.Errorf("store %s of plan %s: %w", File, scope.ID, err)
	}
	return nil
}

// Complete tells whether a plan is in the store with all its files. A damaged list is none: the store clears damaged bytes away.
func Complete(ctx context.Context, client *artifact.Client, namespace, planDigest string) (bool, error) {
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

// readList reads the list of a plan's files, and its text.
func readList(ctx context.Context, client *artifact.Client, scope artifact.Scope, planDigest string) (list, []byte, error) {
	digest, err := client.Published(ctx, scope)
	if err != nil {
		return list{}, nil, fmt.Errorf("plan %s: %w", scope.ID, err)
	}
	text, err := client.ReadAll(ctx, scope, digest, maxListBytes)
	if err != nil {
		return list{}, nil, fmt.Errorf("%s of plan %s: %w", File, scope.ID, err)
	}
	l, err := parseList(text, planDigest)
	return l, text, err
}

// parseList reads the list of a plan. The names become files below a directory.
func parseList(text []byte, planDigest string) (list, error) {
	var l list
	if err := json.Unmarshal(text, &l); err != nil {
		return l, fmt.Errorf("%s: %w", File, err)
	}
	switch {
	case l.Format != Format:
		return l, fmt.Errorf("%s: format is %q; this version reads %q", File, l.Format, Format)
	case string(l.PlanDigest) != planDigest:
		return l, fmt.Errorf("%s is of plan %s, not of %s", File, l.PlanDigest, planDigest)
	case l.Files[plan.ManifestFile] != l.PlanDigest:
		return l, fmt.Errorf("%s: %s has sha256 %q, which must be the plan's digest %s", File, plan.ManifestFile, l.Files[plan.ManifestFile], planDigest)
	}
	for name, digest := range l.Files {
		if _, err := artifact.ParseDigest(string(digest)); err != nil {
			return l, fmt.Errorf("%s: %s: %w", File, name, err)
		}
		if !filepath.IsLocal(name) || name != filepath.Clean(name) || name == "." || name == File {
			return l, fmt.Errorf("%s: %q is no name of a plan's file", File, name)
		}
	}
	return l, nil
}
