// SPDX-License-Identifier: Apache-2.0

package store

import (
	"strings"

	"github.com/semmoe/operator/internal/artifact"
)

// Keys are flat, so that no empty directories remain: namespace.kind.id.digest, or namespace.kind.id.result. The parts
// of a scope contain no dots. The longest key has 200 characters, so that a key with the suffix of a temporary name
// fits into a file name of 255 characters.
func scopePrefix(scope artifact.Scope) string {
	return scope.Namespace + "." + string(scope.Kind) + "." + scope.ID + "."
}

func artifactKey(scope artifact.Scope, digest artifact.Digest) string {
	return scopePrefix(scope) + string(digest)
}

func resultKey(scope artifact.Scope) string { return scopePrefix(scope) + "result" }

// parseArtifactKey parses the key of an artifact. It returns false for all other names in a bucket.
func parseArtifactKey(key string) (artifact.Scope, artifact.Digest, bool) {
	parts := strings.Split(key, ".")
	if len(parts) != 4 {
		return artifact.Scope{}, "", false
	}
	scope := artifact.Scope{Namespace: parts[0], Kind: artifact.Kind(parts[1]), ID: parts[2]}
	digest, err := artifact.ParseDigest(parts[3])
	return scope, digest, err == nil && scope.Validate() == nil
}

// isTemporaryName reports whether a name is a temporary name of fileblob: key.time.tmp.
func isTemporaryName(name string) bool {
	parts := strings.Split(name, ".")
	if len(parts) != 6 || parts[5] != "tmp" {
		return false
	}
	_, _, isArtifact := parseArtifactKey(strings.Join(parts[:4], "."))
	return isArtifact || parts[3] == "result"
}
