package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/semmoe/operator/internal/wholefile"
)

const snapshotName = "backends.json"

// SaveSnapshot writes the backends to a directory, whole or not at all: a router that is killed while it writes must
// find the old file.
func SaveSnapshot(dir string, backends []Backend) error {
	data, err := json.Marshal(backends)
	if err == nil {
		err = wholefile.WriteBytes(filepath.Join(dir, snapshotName), 0o600, data)
	}
	if err != nil {
		return fmt.Errorf("write endpoint snapshot: %w", err)
	}
	return nil
}

// LoadSnapshot reads what SaveSnapshot wrote. Without a snapshot it returns no backends and false.
func LoadSnapshot(dir string) ([]Backend, bool, error) {
	data, err := os.ReadFile(filepath.Join(dir, snapshotName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	var backends []Backend
	if err := json.Unmarshal(data, &backends); err != nil {
		return nil, false, fmt.Errorf("endpoint snapshot in %s: %w", dir, err)
	}
	for i := range backends { // an older version wrote any number
		if b := &backends[i]; b.Ranks < 0 || b.Ranks > MaxRanks || len(b.RankAddresses) > MaxRanks {
			b.Ranks, b.RankAddresses = 0, nil
		}
	}
	return backends, true, nil
}
