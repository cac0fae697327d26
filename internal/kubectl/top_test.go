package kubectl

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/kubectl/view"
)

// What a router tells is compared with what it has told last, or with its beginning where that was seen; else with nothing.
func TestHistory(t *testing.T) {
	heard, begun := view.Routed{Answered: 10}, view.Routed{}
	before := history{pods: []string{"heard", "silent", "gone"}, last: map[string]view.Routed{"heard": heard, "gone": heard}}
	for name, c := range map[string]struct {
		before history
		pods   []string
		want   map[string]view.Routed
	}{
		"the first look":            {history{}, []string{"a", "b"}, map[string]view.Routed{}},
		"one is heard, one is new":  {before, []string{"heard", "new", "silent"}, map[string]view.Routed{"heard": heard, "new": begun}},
		"none are there any longer": {before, nil, map[string]view.Routed{}},
	} {
		if diff := cmp.Diff(c.want, c.before.with(c.pods).last); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
