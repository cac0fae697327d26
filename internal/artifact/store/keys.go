package store

import (
	"strings"

	"github.com/semmoe/operator/internal/artifact"
)

// Keys are flat, so that no empty directories remain: namespace.kind.id.digest, or namespace.kind.id.result. No part of
// a scope holds a dot, and the longest key is 200 characters, which leaves room for a temporary name's suffix in the 255
// of a file name.
func scopePrefix(scope artifact.Scope) string {
	return scope.Namespace + "." + string(scope.Kind) + "." + scope.ID + "."
}

func artifactKey(scope artifact.Scope, digest artifact.Digest) string {
	return scopePrefix(scope) + string(digest)
}

func resultKey(scope artifact.Scope) string { return scopePrefix(scope) + "result" }

// parseArtifactKey tells what an artifact's key names. It refuses every other name that a bucket may hold.
func parseArtifactKey(key string) (artifact.Scope, artifact.Digest, bool) {
	parts := strings.Split(key, ".")
	if len(parts) != 4 {
		return artifact.Scope{}, "", false
	}
	scope := artifact.Scope{Namespace: parts[0], Kind: artifact.Kind(parts[1]), ID: parts[2]}
	digest, err := artifact.ParseDigest(parts[3])
	return scope, digest, err == nil && scope.Validate() == nil
}

// isTemporaryName tells whether fileblob uses the name while it writes an object: key.time.tmp.
func isTemporaryName(name string) bool {
	parts := strings.Split(name, ".")
	if len(parts) != 6 || parts[5] != "tmp" {
		return false
	}
	_, _, isArtifact := parseArtifactKey(strings.Join(parts[:4], "."))
	return isArtifact || parts[3] == "result"
}
