// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Two MoE layers around a dense one, four experts, two ranks.
var shape = Shape{MoE: []bool{true, false, true}, Experts: 4, Ranks: 2}

func rows(list ...string) string {
	return fmt.Sprintf(`{"physical_to_logical_map":[%s]}`, strings.Join(list, ","))
}

func TestCount(t *testing.T) {
	file := filepath.Join(t.TempDir(), "map.json")
	if err := os.WriteFile(file, []byte(rows("[3,0,1,2]", "[9,9,9,9]", "[0,1,2,3]")), 0o600); err != nil {
		t.Fatal(err)
	}
	redundant := shape
	redundant.Redundant = 2
	for name, test := range map[string]struct {
		value         string
		shape         Shape
		rank          int
		local, remote int
	}{
		"trivial, rank 0":           {Trivial, shape, 0, 3, 1},
		"trivial, rank 1":           {Trivial, shape, 1, 1, 3},
		"file, rank 0":              {file, shape, 0, 2, 2},
		"inline, rank 1":            {rows("[3,0,1,2]", "[0,0,0,0]", "[2,3,0,1]"), shape, 1, 2, 2},
		"redundant trivial, rank 1": {Trivial, redundant, 1, 4, 0},
		"redundant map, rank 0":     {rows("[0,1,3,2,3,1]", "[0,0,0,0,0,0]", "[0,1,2,3,0,1]"), redundant, 0, 3, 1},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := Parse(test.value, test.shape)
			if err != nil {
				t.Fatal(err)
			}
			// Layer 0 selects experts 1 and 0, layer 2 selects 3 and 1. The entries of the dense layer do not count.
			var local, remote int
			for l, experts := range [][]uint16{{1, 0}, {0, 0}, {3, 1}} {
				here, away := m.CountLayer(l, test.rank, experts)
				local, remote = local+here, remote+away
			}
			if local != test.local || remote != test.remote {
				t.Errorf("got %d local, %d remote; want %d, %d", local, remote, test.local, test.remote)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	good := "[0,1,2,3]"
	for name, test := range map[string]struct {
		value  string
		change func(*Shape)
		want   string
	}{
		"not JSON":          {"linear", nil, "want trivial"},
		"extra key":         {`{"physical_to_logical_map":[],"note":1}`, nil, "single key"},
		"other key":         {`{"logical_count":[[1]]}`, nil, "single key"},
		"no key":            {`{}`, nil, "physical_to_logical_map is missing"},
		"text behind":       {rows(good, good, good) + "{}", nil, "text after"},
		"torch file":        {"map.pt", nil, ".json files only"},
		"no file":           {"/nonexistent/map.json", nil, "no such file"},
		"rows missing":      {rows(good, good), nil, "2 rows; want one for each of the 3 hidden layers"},
		"row too short":     {rows(good, good, "[0,1,2]"), nil, "row 2 has 3 slots; want 4"},
		"dense row short":   {rows(good, "[]", good), nil, "row 1 has 0 slots"},
		"id too large":      {rows("[0,1,2,4]", good, good), nil, "row 0, slot 3: expert 4; allowed is 0 to 3"},
		"negative id":       {rows("[0,-1,2,3]", good, good), nil, "expert -1"},
		"twice on a rank":   {rows("[0,0,1,2]", good, good), nil, "row 0 places expert 0 twice on rank 0"},
		"expert missing":    {rows("[0,1,0,2]", good, good), nil, "row 0 does not place expert 3"},
		"ranks do not fit":  {Trivial, func(s *Shape) { s.Ranks = 3 }, "expert parallel size 3 does not divide the 4 slots"},
		"no ranks":          {Trivial, func(s *Shape) { s.Ranks = 0 }, "expert parallel size 0"},
		"negative redundat": {Trivial, func(s *Shape) { s.Redundant = -1 }, "-1 redundant experts"},
		"rank too large":    {Trivial, func(s *Shape) { s.Ranks, s.Redundant = 1, 1 }, "5 slots on each rank, but there are only 4 experts"},
	} {
		t.Run(name, func(t *testing.T) {
			s := shape
			if test.change != nil {
				test.change(&s)
			}
			if _, err := Parse(test.value, s); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %v, want %q", err, test.want)
			}
		})
	}
}
