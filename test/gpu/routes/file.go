// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/trace"
)

// tensor is one tensor of the file, with all of its bytes.
type tensor struct {
	name  string
	dtype checkpoint.DType
	shape []int64
	raw   []byte
}

// file collects the tensors in separate lists by element size (see write).
type file struct {
	metadata     map[string]string
	wide, narrow []tensor
}

func (f *file) bytes(name string, raw []byte, shape ...int64) {
	f.narrow = append(f.narrow, tensor{name, "U8", shape, raw})
}

func (f *file) integers(name string, values []int32) {
	var raw []byte
	for _, v := range values {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(v))
	}
	f.wide = append(f.wide, tensor{name, "I32", []int64{int64(len(values))}, raw})
}

// addBatches adds the token IDs and the experts of each batch.
func (f *file) addBatches(t *trace.Trace, batches []batch, layers []int) {
	for _, b := range batches {
		ids := make([]int32, len(b.positions))
		for i, position := range b.positions {
			ids[i] = t.Tokens[position]
		}
		f.integers("tokens."+b.Name, ids)
		var experts []byte
		for _, l := range layers {
			for _, position := range b.positions {
				for _, expert := range t.Row(position, l) {
					experts = append(experts, byte(expert))
				}
			}
		}
		f.bytes("experts."+b.Name, experts, int64(len(layers)), int64(len(b.positions)), int64(t.Model.TopK))
	}
}

// addPlan adds the slots and the token table of a plan's layers.
func (f *file) addPlan(p *solver.Plan, layers []int) {
	f.addSlots(p, layers, "")
	var ranks, scores []byte
	best, vocabulary := p.Tokens.Best, p.Tokens.Vocabulary
	for _, l := range layers {
		begin, end := l*vocabulary*best, (l+1)*vocabulary*best
		for i := begin; i < end; i++ {
			ranks = append(ranks, byte(p.Tokens.Rank[i]))
			scores = binary.LittleEndian.AppendUint16(scores, p.Tokens.Score[i])
		}
	}
	name := fmt.Sprintf("ep%d", p.Placement.Ranks)
	count := int64(len(layers))
	f.bytes("token_rank."+name, ranks, count, int64(vocabulary), int64(best))
	f.wide = append(f.wide, tensor{"token_score." + name, "U16", []int64{count, int64(vocabulary), int64(best)}, scores})
}

// addSlots adds the slots of a plan's layers, as a tensor with a name suffix.
func (f *file) addSlots(p *solver.Plan, layers []int, suffix string) {
	var slots []byte
	for _, l := range layers {
		for _, expert := range p.Placement.Layers[l].Slots {
			slots = append(slots, byte(expert))
		}
	}
	f.bytes(fmt.Sprintf("slots.ep%d%s", p.Placement.Ranks, suffix), slots, int64(len(layers)), int64(len(slots)/len(layers)))
}

// addDealt adds the ranks that the tokens of a batch are assigned to.
func (f *file) addDealt(ranks int, b batch, method string, dealt [][]int, layers []int) {
	var all []byte
	for _, l := range layers {
		for _, rank := range dealt[l] {
			all = append(all, byte(rank))
		}
	}
	f.bytes(fmt.Sprintf("ranks.ep%d.%s.%s", ranks, b.Name, method), all, int64(len(layers)), int64(b.Tokens))
}

// write writes a safetensors file. Tensors with wide elements are first, so that all elements are aligned to their
// size.
func (f *file) write(w io.Writer) error {
	header := &checkpoint.Header{Tensors: map[string]checkpoint.Tensor{}, Metadata: f.metadata}
	all := append(append([]tensor{}, f.wide...), f.narrow...)
	end := int64(0)
	for _, t := range all {
		header.Tensors[t.name] = checkpoint.Tensor{DType: t.dtype, Shape: t.shape, Begin: end, End: end + int64(len(t.raw))}
		end += int64(len(t.raw))
	}
	text, err := checkpoint.EncodeHeader(header, 0)
	if err != nil {
		return err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	if _, err := w.Write(checkpoint.FrameHeader(text)); err != nil {
		return err
	}
	for _, t := range all {
		if _, err := w.Write(t.raw); err != nil {
			return err
		}
	}
	return nil
}
