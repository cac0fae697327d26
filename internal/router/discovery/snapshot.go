// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/files/regularfile"
)

const snapshotName = "backends.json"

// SaveSnapshot writes the backends to a directory atomically: a router that is killed while it writes keeps the old
// file.
func SaveSnapshot(dir string, backends []Backend) error {
	data, err := json.Marshal(backends)
	if err == nil {
		err = atomicfile.WriteBytes(filepath.Join(dir, snapshotName), 0o600, data)
	}
	if err != nil {
		return fmt.Errorf("failed to write the endpoint snapshot: %w", err)
	}
	return nil
}

// maxSnapshotBytes is sufficient for the endpoints of 10,000 pods with 64 ranks each.
const maxSnapshotBytes = 64 << 20

// LoadSnapshot reads the snapshot that SaveSnapshot wrote. It returns false if there is none.
func LoadSnapshot(dir string) ([]Backend, bool, error) {
	data, err := regularfile.Read(filepath.Join(dir, snapshotName), maxSnapshotBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	var backends []Backend
	if err := json.Unmarshal(data, &backends); err != nil {
		return nil, false, fmt.Errorf("failed to decode the endpoint snapshot in %s: %w", dir, err)
	}
	for i := range backends { // earlier versions did not limit the number
		if b := &backends[i]; b.Ranks < 0 || b.Ranks > MaxRanks || len(b.RankAddresses) > MaxRanks {
			b.Ranks, b.RankAddresses = 0, nil
		}
	}
	return backends, true, nil
}
