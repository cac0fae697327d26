// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"fmt"
	"slices"

	"github.com/semmoe/operator/internal/engine"
)

// expertLocation is the value of --init-expert-location. The engine passes the members of the object as keyword
// arguments, so it fails on any other member.
type expertLocation struct {
	// PhysicalToLogicalMap is [hidden layers][slots]. Rows of dense layers are required but have no meaning.
	PhysicalToLogicalMap [][]int `json:"physical_to_logical_map"`
}

func writeMap(l engine.Layout) ([]byte, error) {
	m := expertLocation{make([][]int, l.HiddenLayers)}
	for _, layer := range l.Placement.Layers {
		m.PhysicalToLogicalMap[layer.Layer] = layer.Slots
	}
	identity := identityRow(l.Placement.Ranks*l.Placement.SlotsPerRank, l.Placement.Experts)
	for i, row := range m.PhysicalToLogicalMap {
		if row == nil {
			m.PhysicalToLogicalMap[i] = identity
		}
	}
	return engine.EncodeJSON(m)
}

func identityRow(slots, experts int) []int {
	row := make([]int, slots)
	for slot := range row {
		row[slot] = slot % experts
	}
	return row
}

func readMap(text []byte, shape engine.Shape) ([][]int, error) {
	var m expertLocation
	if err := engine.DecodeJSON(text, &m); err != nil {
		return nil, err
	}
	all := m.PhysicalToLogicalMap
	if len(all) != shape.HiddenLayers {
		return nil, fmt.Errorf("physical_to_logical_map has %d rows; the model has %d layers, including dense layers", len(all), shape.HiddenLayers)
	}
	var rows [][]int
	for layer, row := range all {
		if len(row) != len(all[0]) {
			return nil, fmt.Errorf("row %d of physical_to_logical_map has %d slots, row 0 has %d", layer, len(row), len(all[0]))
		}
		if slices.Contains(shape.MoELayers, layer) {
			rows = append(rows, row)
		} else if !slices.Equal(row, identityRow(len(row), max(1, shape.Experts))) {
			return nil, fmt.Errorf("row %d of physical_to_logical_map places experts of a dense layer", layer)
		}
	}
	return rows, nil
}
