// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/files/regularfile"
)

// maxTablesFile bounds the size of the file, which has about 150 bytes per plan.
const maxTablesFile = 1 << 20

// ReadTables reads a file that maps the digest of a plan, which pods name, to the digest of the plan whose tables are
// used with it. Without a file, every plan uses its own tables.
func ReadTables(path string) (map[string]string, error) {
	text, err := regularfile.Read(path, maxTablesFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var tables map[string]string
	if err := json.Unmarshal(text, &tables); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for plan, from := range tables {
		if _, err := artifact.ParseDigest(plan); err != nil {
			return nil, fmt.Errorf("%s: plan: %w", path, err)
		}
		if _, err := artifact.ParseDigest(from); err != nil {
			return nil, fmt.Errorf("%s: tables of plan %s: %w", path, plan, err)
		}
	}
	return tables, nil
}
