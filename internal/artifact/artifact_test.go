package artifact

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/sets"
)

func TestScopeValidate(t *testing.T) {
	good := Scope{Namespace: "team-a", Kind: Profile, ID: "0123abcd"}
	cases := map[string]struct {
		scope Scope
		want  string // part of the message; empty: valid
	}{
		"good":               {good, ""},
		"longest":            {Scope{strings.Repeat("n", 63), Plan, strings.Repeat("1", 63)}, ""},
		"no namespace":       {Scope{"", Profile, good.ID}, "namespace"},
		"namespace too long": {Scope{strings.Repeat("n", 64), Profile, good.ID}, "namespace"},
		"dot in namespace":   {Scope{"a.b", Profile, good.ID}, "namespace"},
		"dash at the end":    {Scope{"a-", Profile, good.ID}, "namespace"},
		"unknown kind":       {Scope{"a", "models", good.ID}, `"profiles" or "plans"`},
		"short id":           {Scope{"a", Plan, "1234567"}, "8 to 63"},
		"long id":            {Scope{"a", Plan, strings.Repeat("1", 64)}, "8 to 63"},
		"path in id":         {Scope{"a", Plan, "../../etc"}, "8 to 63"},
		"upper case id":      {Scope{"a", Plan, "ABCDEF01"}, "8 to 63"},
		"new line after id":  {Scope{"a", Plan, "0123abcd\n"}, "8 to 63"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			err := tc.scope.Validate()
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestParseDigest(t *testing.T) {
	good := strings.Repeat("0f", 32)
	if d, err := ParseDigest(good); err != nil || string(d) != good || d.Short() != good[:16] {
		t.Errorf("%q: %q, %v", good, d, err)
	}
	if short := Digest("0f0f"); short.Short() != "0f0f" {
		t.Errorf("invalid digest: %q", short.Short())
	}
	for _, bad := range []string{"", good[:63], good + "0", strings.ToUpper(good), "sha256:" + good, good[:63] + "g", good + "\n"} {
		if _, err := ParseDigest(bad); err == nil || !strings.Contains(err.Error(), "64 lower-case") {
			t.Errorf("%q: error %v", bad, err)
		}
	}
}

// FuzzVerified verifies that the reader reaches io.EOF if and only if the bytes match the digest, regardless of how
// they are split.
func FuzzVerified(f *testing.F) {
	f.Add([]byte("routing trace"), 3)
	f.Add([]byte{}, 0)
	f.Fuzz(func(t *testing.T, data []byte, at int) {
		digest, size, err := DigestOf(bytes.NewReader(data))
		if err != nil || size != int64(len(data)) {
			t.Fatal(size, err)
		}
		for name, wrap := range map[string]func(io.Reader) io.Reader{
			"whole": func(r io.Reader) io.Reader { return r }, "bytes": iotest.OneByteReader,
			"halves": iotest.HalfReader, "data with the end": iotest.DataErrReader,
		} {
			if got, err := io.ReadAll(Verified(wrap(bytes.NewReader(data)), digest)); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: %q, %v", name, got, err)
			}
			for change, other := range damaged(data, at) {
				if _, err := io.ReadAll(Verified(wrap(bytes.NewReader(other)), digest)); !errors.Is(err, ErrCorrupt) {
					t.Errorf("%s, %s: error %v", name, change, err)
				}
			}
		}
	})
}

func damaged(data []byte, at int) map[string][]byte {
	cases := map[string][]byte{"longer": append(bytes.Clone(data), 0)}
	if len(data) > 0 {
		flipped := bytes.Clone(data)
		flipped[uint(at)%uint(len(data))] ^= 0x10
		cases["flipped"], cases["shorter"] = flipped, data[:len(data)-1]
	}
	return cases
}

func TestVerifiedKeepsErrors(t *testing.T) {
	digest, _, _ := DigestOf(strings.NewReader("abc"))
	broken := errors.New("broken")
	if _, err := io.ReadAll(Verified(io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(broken)), digest)); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
}

func TestExpired(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	artifactOf := func(digest Digest, age time.Duration) Artifact {
		return Artifact{Scope: Scope{"a", Profile, "12345678"}, Digest: digest, Modified: now.Add(-age)}
	}
	young, old, older := artifactOf("1", time.Hour), artifactOf("2", 25*time.Hour), artifactOf("3", 48*time.Hour)
	boundary, future := artifactOf("4", 24*time.Hour), artifactOf("5", -time.Hour)
	elsewhere := old
	elsewhere.Namespace = "b"
	all := []Artifact{young, old, older, boundary, future, elsewhere}
	cases := map[string]struct {
		live sets.Set[Digest]
		want []Artifact
	}{
		"nothing is live":                  {nil, []Artifact{old, elsewhere, older}},
		"a live digest stays in any scope": {sets.New[Digest]("2"), []Artifact{older}},
		"all are live":                     {sets.New[Digest]("1", "2", "3", "4", "5"), nil},
		"digests that are not stored":      {sets.New[Digest]("9"), []Artifact{old, elsewhere, older}},
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
	artifactOf := func(id string, digest Digest, age time.Duration) Artifact {
		return Artifact{Scope: Scope{"a", Profile, id}, Digest: digest, Modified: now.Add(-age)}
	}
	markOf := func(id string, age time.Duration) Artifact {
		return artifactOf(id, markDigest(Scope{"a", Profile, id}), age)
	}
	profile, marked := artifactOf("12345678", "1", 30*24*time.Hour), markOf("12345678", retention+23*time.Hour)
	other, others := artifactOf("87654321", "2", 30*24*time.Hour), markOf("87654321", retention+25*time.Hour)
	foreign := profile // a mark only protects its own scope
	foreign.ID = "00000000"
	all := []Artifact{profile, marked, other, others, foreign, {Scope: foreign.Scope, Digest: marked.Digest, Modified: now.Add(-retention - time.Hour)}}
	want := []Artifact{all[5], others, other, foreign}
	if diff := cmp.Diff(want, Expired(all, nil, retention, now)); diff != "" {
		t.Error(diff)
	}
}

// TestReferencedArtifactsExpireTogether verifies that an artifact is kept while an unexpired artifact, which may refer to it, was stored
// shortly later.
func TestReferencedArtifactsExpireTogether(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	artifactOf := func(scope string, digest Digest, age time.Duration) Artifact {
		return Artifact{Scope: Scope{"a", Profile, scope}, Digest: digest, Modified: now.Add(-age)}
	}
	trace, manifest := artifactOf("p", "trace", 24*time.Hour+time.Minute), artifactOf("p", "manifest", 24*time.Hour-time.Minute)
	earlier, elsewhere := artifactOf("p", "earlier", 26*time.Hour), artifactOf("q", "elsewhere", 24*time.Hour+time.Minute)
	all := []Artifact{earlier, trace, manifest, elsewhere}
	if diff := cmp.Diff([]Artifact{elsewhere, earlier}, Expired(all, nil, 24*time.Hour, now)); diff != "" {
		t.Errorf("now:\n%s", diff)
	}
	if diff := cmp.Diff([]Artifact{manifest, trace, elsewhere, earlier}, Expired(all, nil, 24*time.Hour, now.Add(time.Hour))); diff != "" {
		t.Errorf("an hour later:\n%s", diff)
	}
	if diff := cmp.Diff([]Artifact{trace, elsewhere, earlier}, Expired(all, sets.New[Digest]("manifest"), 24*time.Hour, now)); diff != "" {
		t.Errorf("what is named:\n%s", diff)
	}
}

// TestTemporary verifies which statuses are retried. A stalled upload (408) is retried, because the next attempt may
// succeed.
func TestTemporary(t *testing.T) {
	for code, want := range map[int]bool{400: false, 404: false, 408: true, 409: false, 429: true, 500: true, 503: true, 507: false} {
		if got := (&StatusError{Code: code}).temporary(); got != want {
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
