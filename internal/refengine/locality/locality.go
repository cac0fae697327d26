// SPDX-License-Identifier: Apache-2.0

package locality

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/semmoe/operator/internal/files/regularfile"
)

// maxMapBytes limits the size of a map file. A map of 100 layers with 1,000 slots has about 500 KB.
const maxMapBytes = 64 << 20

// Trivial is the name of the map that assigns expert p mod Experts to slot p.
const Trivial = "trivial"

// Shape is the required shape of a map.
type Shape struct {
	// MoE is true for each hidden layer with routed experts.
	MoE []bool
	// Experts is the number of logical experts per layer. Redundant is the number of additional slots. Ranks is the
	// expert-parallel size.
	Experts, Redundant, Ranks int
}

func (s Shape) slots() int { return s.Experts + s.Redundant }

// check requires that the slots can be distributed evenly.
func (s Shape) check() error {
	switch {
	case s.Redundant < 0:
		return fmt.Errorf("%d redundant experts; allowed is 0 and more", s.Redundant)
	case s.Ranks < 1 || s.slots()%s.Ranks != 0:
		return fmt.Errorf("expert parallel size %d does not divide the %d slots of a layer (%d experts and %d redundant ones)", s.Ranks, s.slots(), s.Experts, s.Redundant)
	case s.slots()/s.Ranks > s.Experts:
		return fmt.Errorf("%d slots on each rank, but there are only %d experts: use fewer redundant ones", s.slots()/s.Ranks, s.Experts)
	}
	return nil
}

// Map assigns experts to ranks.
type Map struct {
	shape Shape
	// rows is [layers][slots], and unused for dense layers.
	rows [][]int
	// local is [layers][ranks][experts].
	local [][][]bool
}

// Parse reads the value of an expert-map option: "trivial", the path of a .json file, or JSON. The JSON is an object
// with the single key physical_to_logical_map, [hidden layers][slots] of expert IDs. Slot p is on rank p / (slots per
// rank). Rows of dense layers must have the same length but are ignored.
func Parse(value string, shape Shape) (*Map, error) {
	if err := shape.check(); err != nil {
		return nil, err
	}
	if value == Trivial {
		return newMap(shape, trivialRows(shape))
	}
	text, err := source(value)
	if err != nil {
		return nil, err
	}
	rows, err := parseRows(text)
	if err != nil {
		return nil, err
	}
	return newMap(shape, rows)
}

func source(value string) ([]byte, error) {
	switch {
	case strings.HasSuffix(value, ".json"):
		text, err := regularfile.Read(value, maxMapBytes)
		if err != nil {
			return nil, fmt.Errorf("expert map: %w", err)
		}
		return text, nil
	case strings.HasSuffix(value, ".pt"):
		return nil, fmt.Errorf("expert map %s: this engine reads .json files only", value)
	default:
		return []byte(value), nil
	}
}

func parseRows(text []byte) ([][]int, error) {
	var object struct {
		Rows [][]int `json:"physical_to_logical_map"`
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&object); err != nil {
		return nil, fmt.Errorf("expert map: want trivial, the path of a .json file, or an object with the single key physical_to_logical_map: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("expert map: text after the JSON object")
	}
	if object.Rows == nil {
		return nil, errors.New("expert map: physical_to_logical_map is missing")
	}
	return object.Rows, nil
}

func trivialRows(shape Shape) [][]int {
	rows := make([][]int, len(shape.MoE))
	for l := range rows {
		for p := range shape.slots() {
			rows[l] = append(rows[l], p%shape.Experts)
		}
	}
	return rows
}

func newMap(shape Shape, rows [][]int) (*Map, error) {
	if len(rows) != len(shape.MoE) {
		return nil, fmt.Errorf("expert map: %d rows; want one for each of the %d hidden layers, dense ones included", len(rows), len(shape.MoE))
	}
	m := &Map{shape: shape, rows: rows, local: make([][][]bool, len(rows))}
	for l, row := range rows {
		if len(row) != shape.slots() {
			return nil, fmt.Errorf("expert map: row %d has %d slots; want %d (%d experts and %d redundant ones)", l, len(row), shape.slots(), shape.Experts, shape.Redundant)
		}
		if !shape.MoE[l] {
			continue
		}
		if err := m.addLayer(l, row); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *Map) addLayer(l int, row []int) error {
	perRank := m.shape.slots() / m.shape.Ranks
	m.local[l] = make([][]bool, m.shape.Ranks)
	for rank := range m.local[l] {
		m.local[l][rank] = make([]bool, m.shape.Experts)
	}
	placed := make([]bool, m.shape.Experts)
	for p, expert := range row {
		if expert < 0 || expert >= m.shape.Experts {
			return fmt.Errorf("expert map: row %d, slot %d: expert %d; allowed is 0 to %d", l, p, expert, m.shape.Experts-1)
		}
		rank := p / perRank
		if m.local[l][rank][expert] {
			return fmt.Errorf("expert map: row %d places expert %d twice on rank %d", l, expert, rank)
		}
		m.local[l][rank][expert] = true
		placed[expert] = true
	}
	for expert, ok := range placed {
		if !ok {
			return fmt.Errorf("expert map: row %d does not place expert %d", l, expert)
		}
	}
	return nil
}

// Slots returns the experts of an MoE layer in slot order.
func (m *Map) Slots(l int) []int { return m.rows[l] }

// Holds reports whether a rank holds an expert of an MoE layer.
func (m *Map) Holds(l, rank, expert int) bool { return m.local[l][rank][expert] }

// CountLayer counts the local and the remote activations of one token in a layer. A dense layer has none.
func (m *Map) CountLayer(l, rank int, experts []uint16) (local, remote int) {
	byRank := m.local[l]
	if byRank == nil {
		return 0, 0
	}
	for _, expert := range experts {
		if byRank[rank][expert] {
			local++
		}
	}
	return local, len(experts) - local
}
