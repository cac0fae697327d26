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
	"github.com/semmoe/operator/internal/regularfile"
)

// tablesPeriod is how often the file is read that says which tables are to be used: a fraction of the time that a ConfigMap takes
// to reach a pod.
const tablesPeriod = 5 * time.Second

// maxTablesFile bounds the file, which has about 150 bytes for each plan.
const maxTablesFile = 1 << 20

// readTables reads a file that says for the digest of a plan, which pods name, that of the plan whose tables score their requests.
// Without a file it is every plan's own.
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

// WatchTables calls set with what a file says, at first and whenever it says something else, until the context ends. While it
// cannot be read, what it last said holds.
func WatchTables(ctx context.Context, path string, set func(map[string]string)) {
	watchTables(ctx, path, tablesPeriod, set)
}

func watchTables(ctx context.Context, path string, period time.Duration, set func(map[string]string)) {
	log := logr.FromContextOrDiscard(ctx).WithValues("file", path)
	var last map[string]string
	told, failed := false, ""
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		switch tables, err := readTables(path); {
		case err != nil && err.Error() != failed:
			failed = err.Error()
			log.Info("Going on with the tables that are in use", "reason", failed)
		case err == nil:
			if failed = ""; !told || !maps.Equal(tables, last) {
				told, last = true, tables
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
