package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/semmoe/operator/solver/placement"
)

// ExpertMap is the file by which an engine is told which expert sits in which slot.
type ExpertMap struct {
	// File is its name in a plan's ConfigMap; in a plan's directory it lies below engine/.
	File string
	// Write writes the file for a layout that is valid.
	Write func(Layout) ([]byte, error)
	// Read reads it back: for each of the shape's MoE layers, the experts in slot order. It checks what the format says
	// of itself; Decode checks the rest.
	Read func(text []byte, shape Shape) ([][]int, error)
}

// Layout is a placement in a model.
type Layout struct {
	Placement *placement.Placement
	// HiddenLayers counts all layers of the model, dense ones included.
	HiddenLayers int
}

// Shape is what a file does not tell of itself.
type Shape struct {
	// HiddenLayers counts all layers of the model, MoELayers are the indices of those that the map places, ascending.
	HiddenLayers int
	MoELayers    []int
	// Experts is the number of experts of a layer, Ranks the expert-parallel size.
	Experts, Ranks int
}

// Shape is the layout's.
func (l Layout) Shape() Shape {
	shape := Shape{HiddenLayers: l.HiddenLayers, Experts: l.Placement.Experts, Ranks: l.Placement.Ranks}
	for _, layer := range l.Placement.Layers {
		shape.MoELayers = append(shape.MoELayers, layer.Layer)
	}
	return shape
}

// Validate refuses a layout by which an engine would fail, or compute something else.
func (l Layout) Validate() error {
	if err := l.Placement.Validate(); err != nil {
		return err
	}
	if last := l.Placement.Layers[len(l.Placement.Layers)-1].Layer; l.HiddenLayers <= last {
		return fmt.Errorf("the model has %d layers; the placement has layer %d", l.HiddenLayers, last)
	}
	return nil
}

// Encode writes the file.
func (m *ExpertMap) Encode(l Layout) ([]byte, error) {
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", m.File, err)
	}
	return m.Write(l)
}

// Decode reads the file, and refuses one that is no whole placement of the shape.
func (m *ExpertMap) Decode(text []byte, shape Shape) (*placement.Placement, error) {
	rows, err := m.Read(text, shape)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.File, err)
	}
	if len(rows) != len(shape.MoELayers) || len(rows) == 0 {
		return nil, fmt.Errorf("%s: places %d layers; the model has %d MoE layers", m.File, len(rows), len(shape.MoELayers))
	}
	if slots := len(rows[0]); shape.Ranks < 1 || slots%shape.Ranks != 0 {
		return nil, fmt.Errorf("%s: %d slots cannot be spread over %d ranks", m.File, slots, shape.Ranks)
	}
	p := &placement.Placement{Ranks: shape.Ranks, Experts: shape.Experts, SlotsPerRank: len(rows[0]) / shape.Ranks}
	for i, row := range rows {
		p.Layers = append(p.Layers, placement.Layer{Layer: shape.MoELayers[i], Slots: row})
	}
	if err := (Layout{p, shape.HiddenLayers}).Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", m.File, err)
	}
	return p, nil
}

// EncodeJSON is compact JSON that ends in a line feed, as text files do.
func EncodeJSON(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	return append(text, '\n'), err
}

// DecodeJSON refuses members that the format does not have, and anything after the object.
func DecodeJSON(text []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("text after the JSON object")
	}
	return nil
}
