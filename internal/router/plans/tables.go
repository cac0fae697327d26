// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/files/regularfile"
)

// tablesPeriod is the poll period of the tables file. It is a fraction of the time that a ConfigMap takes to reach a
// pod.
const tablesPeriod = 5 * time.Second

// maxTablesFile bounds the size of the file, which has about 150 bytes per plan.
const maxTablesFile = 1 << 20

// readTables reads a file that maps the digest of a plan, which pods name, to the digest of the plan whose tables score
// their requests. Without a file, every plan uses its own tables.
func readTables(path string) (map[string]string, error) {
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

// WatchTables calls set with the content of a file, first at the start and then after each change, until the context
// ends. While the file is unreadable, the last content stays in effect.
func WatchTables(ctx context.Context, path string, set func(map[string]string)) {
	watchTables(ctx, path, tablesPeriod, set)
}

func watchTables(ctx context.Context, path string, period time.Duration, set func(map[string]string)) {
	log := logr.FromContextOrDiscard(ctx).WithValues("file", path)
	var last map[string]string
	known, failed := false, ""
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		switch tables, err := readTables(path); {
		case err != nil && err.Error() != failed:
			failed = err.Error()
			log.Info("Failed to read the tables file; keeping the tables in use", "reason", failed)
		case err == nil:
			if failed = ""; !known || !maps.Equal(tables, last) {
				known, last = true, tables
				set(tables)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
