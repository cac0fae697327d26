// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/kubectl/view"
)

// TestHistory verifies that the metrics of a router are compared with its last metrics, with zero if the router started
// since the previous poll, and else with nothing.
func TestHistory(t *testing.T) {
	read, started := view.RouterMetrics{Answered: 10}, view.RouterMetrics{}
	before := history{pods: []string{"read", "unread", "deleted"}, last: map[string]view.RouterMetrics{"read": read, "deleted": read}}
	for name, c := range map[string]struct {
		before history
		pods   []string
		want   map[string]view.RouterMetrics
	}{
		"first poll":               {history{}, []string{"a", "b"}, map[string]view.RouterMetrics{}},
		"one read, one new":        {before, []string{"read", "new", "unread"}, map[string]view.RouterMetrics{"read": read, "new": started}},
		"all routers were deleted": {before, nil, map[string]view.RouterMetrics{}},
	} {
		if diff := cmp.Diff(c.want, c.before.with(c.pods).last); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
