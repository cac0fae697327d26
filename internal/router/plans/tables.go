// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"context"
	"maps"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/plan/bundle"
)

// tablesPeriod is the poll period of the tables file. It is a fraction of the time that a ConfigMap takes to reach a
// pod.
const tablesPeriod = 5 * time.Second

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
		switch tables, err := bundle.ReadTables(path); {
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
