// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"
)

func TestParseActs(t *testing.T) {
	for text, want := range map[string][]int{defaultActs: {1, 2}, "1": {1}, "3": {3}, "1,2,3": {1, 2, 3}, "2,1": {1, 2}} {
		if got, err := parseActs(text); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "4", "1,", "1,1", "all", "1 2"} {
		if got, err := parseActs(text); err == nil {
			t.Errorf("%q: got acts %v, want an error", text, got)
		}
	}
}
