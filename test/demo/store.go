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
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/scramble"
)

const (
	// storeName names the artifact store's Service in systemNamespace, storeManager the account that may write everything there.
	systemNamespace = "semmoe-system"
	storeName       = "semmoe-store"
	storeManager    = "semmoe-manager"
	// scrambleSeed chooses the numbers that experts get.
	scrambleSeed = 1
	// maxTraceBytes bounds a routing trace, uncompressed; the demo's have a few megabytes.
	maxTraceBytes = 256 << 20
)

// storeClient is a client of the artifact store with the operator's own rights. Its token is kept in the directory.
func (d *demo) storeClient(ctx context.Context, directory string) (*artifact.Client, error) {
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
	return artifact.NewClient(artifact.Config{
		// The name that the store's certificate is for.
		URL: "https://" + storeName + "." + systemNamespace + ".svc", CA: []byte(authority), TokenFile: file,
		Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	})
}

// publishScrambled publishes a profile with renumbered experts, made from that of an AffinityProfile which is complete, and
// returns its sampling: an AffinityProfile of the same data set that asks for this sampling finds the result in the store.
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
		return s, fmt.Errorf("scramble the profile %s: %w", from.Name, err)
	}
	manifest.Sampling.Requests++ // inputs that nobody has profiled
	scope.ID = manifest.ID()
	_, err = profile.Publish(ctx, store, scope, manifest, files)
	return manifest.Sampling, err
}

// scrambledFiles writes the files of a profile to the directory, with renumbered experts, and returns their paths by name.
func scrambledFiles(ctx context.Context, store *artifact.Client, scope artifact.Scope, manifest profile.Manifest, directory string) (map[string]string, error) {
	stream, err := store.Get(ctx, scope, manifest.Files[profile.TraceFile])
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	routes, err := trace.Read(stream, maxTraceBytes)
	if err != nil {
		return nil, err
	}
	scramble.Experts(routes, scrambleSeed)
	files := map[string]string{}
	for _, name := range []string{profile.TraceFile, profile.CountsFile, profile.TokenizerFile} {
		files[name] = filepath.Join(directory, name)
	}
	if err := trace.Create(files[profile.TraceFile], routes); err != nil {
		return nil, err
	}
	// Counts are for plans that are made without a trace: this one needs none.
	if err := os.WriteFile(files[profile.CountsFile], nil, 0o600); err != nil {
		return nil, err
	}
	tokenizer, err := store.ReadAll(ctx, scope, manifest.Files[profile.TokenizerFile], maxTraceBytes)
	if err != nil {
		return nil, err
	}
	return files, os.WriteFile(files[profile.TokenizerFile], tokenizer, 0o600)
}
