// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
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
