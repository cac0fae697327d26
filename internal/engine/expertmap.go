// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/semmoe/operator/solver/placement"
)

// ExpertMap is the format of the file that maps experts to slots for an engine.
type ExpertMap struct {
	// File is the name of the file in a plan's ConfigMap. In a plan's directory, the file is in engine/.
	File string
	// Write encodes a valid layout.
	Write func(Layout) ([]byte, error)
	// Read decodes the file to the experts of each of the shape's MoE layers in slot order. It checks only what the
	// format itself declares. Decode checks the rest.
	Read func(text []byte, shape Shape) ([][]int, error)
}

// Layout is a placement in a model.
type Layout struct {
	Placement *placement.Placement
	// HiddenLayers is the number of layers of the model, including dense layers.
	HiddenLayers int
}

// Shape contains the model properties that the file does not contain.
type Shape struct {
	// HiddenLayers is the number of layers of the model. MoELayers lists the indices of the layers in the map, in
	// ascending order.
	HiddenLayers int
	MoELayers    []int
	// Experts is the number of experts per layer. Ranks is the expert-parallel size.
	Experts, Ranks int
}

// Shape returns the shape of the layout.
func (l Layout) Shape() Shape {
	shape := Shape{HiddenLayers: l.HiddenLayers, Experts: l.Placement.Experts, Ranks: l.Placement.Ranks}
	for _, layer := range l.Placement.Layers {
		shape.MoELayers = append(shape.MoELayers, layer.Layer)
	}
	return shape
}

// Validate returns an error for a layout with which an engine would fail or compute different outputs.
func (l Layout) Validate() error {
	if err := l.Placement.Validate(); err != nil {
		return err
	}
	if last := l.Placement.Layers[len(l.Placement.Layers)-1].Layer; l.HiddenLayers <= last {
		return fmt.Errorf("the model has %d layers; the placement has layer %d", l.HiddenLayers, last)
	}
	return nil
}

// Encode validates the layout and encodes the file.
func (m *ExpertMap) Encode(l Layout) ([]byte, error) {
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", m.File, err)
	}
	return m.Write(l)
}

// Decode decodes the file. It returns an error if the file is not a complete placement for the shape.
func (m *ExpertMap) Decode(text []byte, shape Shape) (*placement.Placement, error) {
	rows, err := m.Read(text, shape)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.File, err)
	}
	if len(rows) != len(shape.MoELayers) || len(rows) == 0 {
		return nil, fmt.Errorf("%s: contains %d layers; the model has %d MoE layers", m.File, len(rows), len(shape.MoELayers))
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

// EncodeJSON returns compact JSON that ends in a line feed, like a text file.
func EncodeJSON(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	return append(text, '\n'), err
}

// DecodeJSON decodes a JSON object. It returns an error for unknown members, and for text after the object.
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
