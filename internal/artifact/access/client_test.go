// SPDX-License-Identifier: Apache-2.0

package access

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/semmoe/operator/internal/artifact"
)

func TestExpired(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	artifactOf := func(digest artifact.Digest, age time.Duration) artifact.Artifact {
		return artifact.Artifact{Scope: artifact.Scope{Namespace: "a", Kind: artifact.Profile, ID: "12345678"}, Digest: digest, Modified: now.Add(-age)}
	}
	young, old, older := artifactOf("1", time.Hour), artifactOf("2", 25*time.Hour), artifactOf("3", 48*time.Hour)
	boundary, future := artifactOf("4", 24*time.Hour), artifactOf("5", -time.Hour)
	elsewhere := old
	elsewhere.Namespace = "b"
	all := []artifact.Artifact{young, old, older, boundary, future, elsewhere}
	cases := map[string]struct {
		live sets.Set[artifact.Digest]
		want []artifact.Artifact
	}{
		"nothing is live":                  {nil, []artifact.Artifact{old, elsewhere, older}},
		"a live digest stays in any scope": {sets.New[artifact.Digest]("2"), []artifact.Artifact{older}},
		"all are live":                     {sets.New[artifact.Digest]("1", "2", "3", "4", "5"), nil},
		"digests that are not stored":      {sets.New[artifact.Digest]("9"), []artifact.Artifact{old, elsewhere, older}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, Expired(all, tc.live, 24*time.Hour, now)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestExpireAfterTheLastMark verifies that the retention period starts at the last mark of a scope, and that the mark
// expires with the artifacts.
func TestExpireAfterTheLastMark(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	const retention = 7 * 24 * time.Hour
	artifactOf := func(id string, digest artifact.Digest, age time.Duration) artifact.Artifact {
		return artifact.Artifact{Scope: artifact.Scope{Namespace: "a", Kind: artifact.Profile, ID: id}, Digest: digest, Modified: now.Add(-age)}
	}
	markOf := func(id string, age time.Duration) artifact.Artifact {
		return artifactOf(id, markDigest(artifact.Scope{Namespace: "a", Kind: artifact.Profile, ID: id}), age)
	}
	profile, marked := artifactOf("12345678", "1", 30*24*time.Hour), markOf("12345678", retention+23*time.Hour)
	other, others := artifactOf("87654321", "2", 30*24*time.Hour), markOf("87654321", retention+25*time.Hour)
	foreign := profile // a mark only protects its own scope
	foreign.ID = "00000000"
	all := []artifact.Artifact{profile, marked, other, others, foreign, {Scope: foreign.Scope, Digest: marked.Digest, Modified: now.Add(-retention - time.Hour)}}
	want := []artifact.Artifact{all[5], others, other, foreign}
	if diff := cmp.Diff(want, Expired(all, nil, retention, now)); diff != "" {
		t.Error(diff)
	}
}

// TestExpireTogether verifies that an artifact is kept while an unexpired artifact, which may refer to it, was stored
// shortly later.
func TestExpireTogether(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	artifactOf := func(scope string, digest artifact.Digest, age time.Duration) artifact.Artifact {
		return artifact.Artifact{Scope: artifact.Scope{Namespace: "a", Kind: artifact.Profile, ID: scope}, Digest: digest, Modified: now.Add(-age)}
	}
	trace, manifest := artifactOf("p", "trace", 24*time.Hour+time.Minute), artifactOf("p", "manifest", 24*time.Hour-time.Minute)
	earlier, elsewhere := artifactOf("p", "earlier", 26*time.Hour), artifactOf("q", "elsewhere", 24*time.Hour+time.Minute)
	all := []artifact.Artifact{earlier, trace, manifest, elsewhere}
	if diff := cmp.Diff([]artifact.Artifact{elsewhere, earlier}, Expired(all, nil, 24*time.Hour, now)); diff != "" {
		t.Errorf("now:\n%s", diff)
	}
	if diff := cmp.Diff([]artifact.Artifact{manifest, trace, elsewhere, earlier}, Expired(all, nil, 24*time.Hour, now.Add(time.Hour))); diff != "" {
		t.Errorf("an hour later:\n%s", diff)
	}
	if diff := cmp.Diff([]artifact.Artifact{trace, elsewhere, earlier}, Expired(all, sets.New[artifact.Digest]("manifest"), 24*time.Hour, now)); diff != "" {
		t.Errorf("what is named:\n%s", diff)
	}
}

// TestTemporary verifies which statuses are retried. A stalled upload (408) is retried, because the next attempt may
// succeed.
func TestTemporary(t *testing.T) {
	for code, want := range map[int]bool{400: false, 404: false, 408: true, 409: false, 429: true, 500: true, 503: true, 507: false} {
		if got := temporary(&artifact.StatusError{Code: code}); got != want {
			t.Errorf("status %d is temporary: %v, want %v", code, got, want)
		}
	}
}

func TestNewClientRejectsInvalidConfig(t *testing.T) {
	for url, want := range map[string]string{
		"http://store":  "must be https://",
		"store:8443":    "must be https://",
		"":              "must be https://",
		"https://store": "CA file",
	} {
		if _, err := NewClient(Config{URL: url, CAFile: "/does/not/exist"}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one with %q", url, err, want)
		}
	}
}
