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

// Digest is a sha256: 64 lower-case hexadecimal characters.
type Digest string

var digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// ParseDigest reads a digest.
func ParseDigest(s string) (Digest, error) {
	if !digestPattern.MatchString(s) {
		return "", fmt.Errorf("digest %q: must be a sha256, 64 lower-case hexadecimal characters", s)
	}
	return Digest(s), nil
}

// ShortLength is the length of a short digest.
const ShortLength = 16

// Short is the part of a digest that names, labels and headers hold. Of one that somebody else wrote, and that is shorter, it is all.
func (d Digest) Short() string { return string(d[:min(len(d), ShortLength)]) }

// DigestOf reads r to its end, and returns the digest and the number of its bytes.
func DigestOf(r io.Reader) (Digest, int64, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return sum(h), n, err
}

func sum(h hash.Hash) Digest { return Digest(hex.EncodeToString(h.Sum(nil))) }

// ErrCorrupt tells that bytes are not those of their digest.
var ErrCorrupt = errors.New("the bytes are not those of the digest")

// Verified returns a reader of the same bytes that ends with ErrCorrupt, instead of io.EOF, if they are not those of the
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
