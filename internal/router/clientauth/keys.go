// SPDX-License-Identifier: Apache-2.0

package clientauth

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/files/regularfile"
)

const (
	// minKeyBytes and maxKeyBytes bound the length of a key, maxKeys the number of keys.
	minKeyBytes, maxKeyBytes = 16, 4 << 10
	maxKeys                  = 1024
	// reloadPeriod is the poll period of the directory. It is a fraction of the time that a Secret takes to reach a pod.
	reloadPeriod = 5 * time.Second
)

// keyName matches the names of the keys of a Secret.
var keyName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}$`)

// Keys are the API keys of the clients. They are safe for concurrent use.
type Keys struct {
	dir     string
	current atomic.Pointer[[]key]
}

type key struct {
	name string
	hash [sha256.Size]byte
}

// Load reads the keys in a directory, such as a mounted Secret: a file for each key, named for the client.
func Load(dir string) (*Keys, error) {
	keys := &Keys{dir: dir}
	read, err := readKeys(dir)
	if err != nil {
		return nil, err
	}
	keys.current.Store(&read)
	return keys, nil
}

// Watch reads the keys again periodically until the context ends.
func (k *Keys) Watch(ctx context.Context) { k.watch(ctx, reloadPeriod) }

func (k *Keys) watch(ctx context.Context, period time.Duration) {
	log, failed := logr.FromContextOrDiscard(ctx), ""
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		read, err := readKeys(k.dir)
		switch {
		case err != nil && err.Error() != failed:
			failed = err.Error()
			log.Info("Failed to read the API keys; keeping the keys in use", "reason", failed)
		case err == nil:
			if failed = ""; !slices.Equal(read, *k.current.Load()) {
				k.current.Store(&read)
				log.Info("API keys changed", "clients", names(read))
			}
		}
	}
}

func names(keys []key) []string {
	var all []string
	for _, k := range keys {
		all = append(all, k.name)
	}
	return all
}

// readKeys returns the keys in a directory, ordered by name.
func readKeys(dir string) ([]key, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var keys []key
	owners := map[[sha256.Size]byte]string{}
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") { // of the kubelet
			continue
		}
		file := filepath.Join(dir, name)
		if !keyName.MatchString(name) {
			return nil, fmt.Errorf("%q is invalid: letters, digits and ._- are allowed in the name of a client", file)
		}
		text, err := regularfile.Read(file, maxKeyBytes)
		if err != nil {
			return nil, err
		}
		text = bytes.TrimSpace(text)
		if len(text) < minKeyBytes || bytes.ContainsFunc(text, func(c rune) bool { return c <= ' ' || c > '~' }) {
			return nil, fmt.Errorf("the key in %q is invalid: %d to %d printable ASCII characters without spaces are allowed", file, minKeyBytes, maxKeyBytes)
		}
		hash := sha256.Sum256(text)
		if other, taken := owners[hash]; taken {
			return nil, fmt.Errorf("the key in %q is invalid: %q has the same key", file, other)
		}
		owners[hash] = name
		keys = append(keys, key{name, hash})
	}
	switch {
	case len(keys) == 0:
		return nil, fmt.Errorf("%s contains no API key: one file for each client is required", dir)
	case len(keys) > maxKeys:
		return nil, fmt.Errorf("%s contains %d API keys: at most %d are allowed", dir, len(keys), maxKeys)
	}
	return keys, nil
}

// Reasons why a request is rejected.
var (
	ErrMissing = errors.New("an API key is required, as Authorization: Bearer or x-api-key")
	ErrWrong   = errors.New("the API key is not valid")
)

// The headers with a key: OpenAI's and Anthropic's.
const (
	bearerHeader = "Authorization"
	keyHeader    = "X-Api-Key"
)

// Authenticate returns the name of the client that sent a request, and removes the key from its header.
func (k *Keys) Authenticate(header http.Header) (name string, err error) {
	presented := header.Get(keyHeader)
	if scheme, token, found := strings.Cut(header.Get(bearerHeader), " "); found && strings.EqualFold(scheme, "Bearer") {
		presented = strings.TrimSpace(token)
	}
	header.Del(bearerHeader)
	header.Del(keyHeader)
	if presented == "" {
		return "", ErrMissing
	}
	hash := sha256.Sum256([]byte(presented))
	for _, candidate := range *k.current.Load() {
		if subtle.ConstantTimeCompare(hash[:], candidate.hash[:]) == 1 {
			name = candidate.name
		}
	}
	if name == "" {
		return "", ErrWrong
	}
	return name, nil
}
