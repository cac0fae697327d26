// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"regexp"
)

// Digest is a SHA-256 digest: 64 lower-case hexadecimal characters.
type Digest string

var digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// ParseDigest validates a digest.
func ParseDigest(s string) (Digest, error) {
	if !digestPattern.MatchString(s) {
		return "", fmt.Errorf("digest %q: must be a sha256, 64 lower-case hexadecimal characters", s)
	}
	return Digest(s), nil
}

// shortLength is the length of a short digest.
const shortLength = 16

// Short returns the first shortLength characters, which are used in names, labels and headers. A shorter, invalid
// digest is returned unchanged.
func (d Digest) Short() string { return string(d[:min(len(d), shortLength)]) }

// DigestOf reads r to its end. It returns the digest and the number of bytes.
func DigestOf(r io.Reader) (Digest, int64, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return sum(h), n, err
}

func sum(h hash.Hash) Digest { return Digest(hex.EncodeToString(h.Sum(nil))) }

// ErrCorrupt reports bytes that do not match their digest.
var ErrCorrupt = errors.New("the bytes do not match the digest")

// Verified returns a reader of the same bytes. It returns ErrCorrupt instead of io.EOF if the bytes do not match the
// digest.
func Verified(r io.Reader, want Digest) io.Reader {
	return &verifier{r: r, hash: sha256.New(), want: want}
}

type verifier struct {
	r    io.Reader
	hash hash.Hash
	want Digest
}

func (v *verifier) Read(p []byte) (int, error) {
	n, err := v.r.Read(p)
	v.hash.Write(p[:n])
	if err == io.EOF {
		if got := sum(v.hash); got != v.want {
			return n, fmt.Errorf("%w: sha256 is %s, expected %s", ErrCorrupt, got, v.want)
		}
	}
	return n, err
}
