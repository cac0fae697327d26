// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/expertscrambling"
)

const (
	// storeName is the artifact store's Service in systemNamespace, storeManager the service account that may write all
	// artifacts.
	systemNamespace = "semmoe-system"
	storeName       = "semmoe-store"
	storeManager    = "semmoe-manager"
	// scrambleSeed is the random seed of the expert renumbering.
	scrambleSeed = 1
	// maxTraceBytes is the maximum uncompressed size of a routing trace. Traces of the demo have a few megabytes.
	maxTraceBytes = 256 << 20
)

// storeClient returns a client of the artifact store with the permissions of the operator. It writes its token to the
// directory.
func (d *demo) storeClient(ctx context.Context, directory string) (*access.Client, error) {
	token, err := d.cluster.run(ctx, nil, "create", "token", "-n", systemNamespace, storeManager, "--audience="+artifact.Audience, "--duration=10m")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(directory, "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		return nil, err
	}
	authority, err := d.cluster.run(ctx, nil, "get", "configmap", "-n", systemNamespace, storeName+"-ca", "-o", `jsonpath={.data.ca\.crt}`)
	if err != nil {
		return nil, err
	}
	address, err := d.cluster.reach(ctx, systemNamespace, storeName, 443)
	if err != nil {
		return nil, err
	}
	return access.NewClient(access.Config{
		// The host must be the name in the store's certificate.
		URL: "https://" + storeName + "." + systemNamespace + ".svc", CA: []byte(authority), TokenFile: file,
		Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	})
}

// publishScrambled copies the profile of a complete AffinityProfile, renumbers its experts, and publishes the copy. It
// returns the sampling of the copy: an AffinityProfile with the same data set and this sampling finds the copy in the
// store.
func (d *demo) publishScrambled(ctx context.Context, from *semmoev1.AffinityProfile) (s profile.Sampling, err error) {
	directory, err := os.MkdirTemp("", "semmoe-demo-")
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(directory)) }()
	store, err := d.storeClient(ctx, directory)
	if err != nil {
		return s, err
	}
	scope := artifact.Scope{Namespace: namespace, Kind: artifact.Profile, ID: from.Status.Inputs}
	manifest, err := profile.FetchManifest(ctx, store, scope, artifact.Digest(from.Status.Result.Digest))
	if err != nil {
		return s, err
	}
	files, err := scrambledFiles(ctx, store, scope, manifest, directory)
	if err != nil {
		return s, fmt.Errorf("failed to renumber the experts of profile %s: %w", from.Name, err)
	}
	manifest.Sampling.Requests++ // inputs for which the store has no profile
	scope.ID = manifest.ID()
	_, err = profile.Publish(ctx, store, scope, manifest, files)
	return manifest.Sampling, err
}

// scrambledFiles writes the files of a profile with renumbered experts to the directory, and returns their paths by
// name.
func scrambledFiles(ctx context.Context, store *access.Client, scope artifact.Scope, manifest profile.Manifest, directory string) (map[string]string, error) {
	stream, err := store.Get(ctx, scope, manifest.Files[profile.TraceFile])
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	routes, err := trace.Read(stream, maxTraceBytes)
	if err != nil {
		return nil, err
	}
	expertscrambling.Experts(routes, scrambleSeed)
	files := map[string]string{}
	for _, name := range []string{profile.TraceFile, profile.CountsFile, profile.TokenizerFile} {
		files[name] = filepath.Join(directory, name)
	}
	if err := trace.Create(files[profile.TraceFile], routes); err != nil {
		return nil, err
	}
	// Only plans without a trace use the counts. This profile has a trace, so its counts stay empty.
	if err := os.WriteFile(files[profile.CountsFile], nil, 0o600); err != nil {
		return nil, err
	}
	tokenizer, err := store.ReadAll(ctx, scope, manifest.Files[profile.TokenizerFile], maxTraceBytes)
	if err != nil {
		return nil, err
	}
	return files, os.WriteFile(files[profile.TokenizerFile], tokenizer, 0o600)
}
