// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
)

// The tensors of tables.safetensors.
const (
	tokenRankScore = "token_rank_score"
	tokenRank      = "token_rank"
	tokenScore     = "token_score"
	transitionRank = "transition_rank"
	transitionConf = "transition_confidence"
	tokenSeen      = "token_seen"
	pairSeen       = "pair_seen"
)

const (
	u8  checkpoint.DType = "U8"
	u16 checkpoint.DType = "U16"
	i32 checkpoint.DType = "I32"
)

// array is one tensor.
type array struct {
	dtype checkpoint.DType
	shape []int
	// values are the elements of U8 and U16 tensors, integers those of I32, and floats those of F32.
	values   []uint16
	integers []int32
	floats   []float32
}

func (a array) width() int {
	switch a.dtype {
	case u8:
		return 1
	case u16:
		return 2
	default:
		return 4
	}
}

func (a array) elements() int { return len(a.values) + len(a.integers) + len(a.floats) }

func (a array) appendTo(out []byte) []byte {
	for _, v := range a.values {
		if a.dtype == u8 {
			out = append(out, byte(v))
		} else {
			out = binary.LittleEndian.AppendUint16(out, v)
		}
	}
	for _, v := range a.integers {
		out = binary.LittleEndian.AppendUint32(out, uint32(v))
	}
	for _, v := range a.floats {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
	}
	return out
}

// read sets the values from the bytes of n elements.
func (a *array) read(raw []byte, n int) {
	switch a.dtype {
	case u8:
		a.values = make([]uint16, n)
		for i := range a.values {
			a.values[i] = uint16(raw[i])
		}
	case u16:
		a.values = make([]uint16, n)
		for i := range a.values {
			a.values[i] = binary.LittleEndian.Uint16(raw[2*i:])
		}
	case i32:
		a.integers = make([]int32, n)
		for i := range a.integers {
			a.integers[i] = int32(binary.LittleEndian.Uint32(raw[4*i:]))
		}
	case checkpoint.F32:
		a.floats = make([]float32, n)
		for i := range a.floats {
			a.floats[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
		}
	}
}

// encodeTables encodes the forecast tables of the plan for the layout.
func encodeTables(p *solver.Plan, layout string) ([]byte, error) {
	metadata := map[string]string{
		"format": Format, "layout": layout, "ep_size": strconv.Itoa(p.Placement.Ranks), "score_scale": strconv.Itoa(affinity.ScoreScale),
	}
	arrays := map[string]array{}
	if p.Ranks != nil {
		arrays[tokenRankScore] = array{dtype: u16, shape: []int{p.Ranks.Vocabulary(), p.Ranks.Ranks}, values: p.Ranks.Score}
	}
	if t := p.Tokens; t != nil {
		shape := []int{t.Layers, t.Vocabulary, t.Best}
		arrays[tokenRank] = array{dtype: rankDType(t.Ranks), shape: shape, values: t.Rank}
		arrays[tokenScore] = array{dtype: u16, shape: shape, values: t.Score}
	}
	if t := p.Transitions; t != nil {
		shape := []int{t.Layers, t.Ranks, t.Ranks}
		arrays[transitionRank] = array{dtype: rankDType(t.Ranks), shape: shape, values: t.Rank}
		arrays[transitionConf] = array{dtype: u16, shape: shape, values: t.Confidence}
	}
	if s := p.Seen; s != nil {
		arrays[tokenSeen] = array{dtype: u16, shape: []int{len(s.Tokens)}, values: s.Tokens}
		arrays[pairSeen] = array{dtype: u16, shape: []int{len(s.Pairs)}, values: s.Pairs}
	}
	if p.LookAhead != nil {
		addLookAhead(arrays, metadata, p.LookAhead)
	}
	if p.LookBack != nil {
		addLookBack(arrays, metadata, p.LookBack)
	}
	if p.Context != nil {
		metadata[topK] = strconv.Itoa(p.Context.TopK)
		addForecast(arrays, p.Context)
	}
	return encodeArrays(arrays, metadata)
}

func rankDType(ranks int) checkpoint.DType {
	if ranks <= 1<<8 {
		return u8
	}
	return u16
}

func encodeArrays(arrays map[string]array, metadata map[string]string) ([]byte, error) {
	type entry struct {
		DType   checkpoint.DType `json:"dtype"`
		Shape   []int            `json:"shape"`
		Offsets [2]int           `json:"data_offsets"`
	}
	header := map[string]any{"__metadata__": metadata}
	// Wide elements are first, so that the offset of each tensor is a multiple of its element size.
	names := slices.SortedFunc(maps.Keys(arrays), func(a, b string) int {
		return cmp.Or(arrays[b].width()-arrays[a].width(), cmp.Compare(a, b))
	})
	end := 0
	for _, name := range names {
		a := arrays[name]
		size := a.elements() * a.width()
		header[name] = entry{a.dtype, a.shape, [2]int{end, end + size}}
		end += size
	}
	text, err := json.Marshal(header)
	if err != nil {
		return nil, err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	out := make([]byte, 0, 8+len(text)+end)
	out = binary.LittleEndian.AppendUint64(out, uint64(len(text)))
	out = append(out, text...)
	for _, name := range names {
		out = arrays[name].appendTo(out)
	}
	return out, nil
}

// decodeTables adds the tables to a plan whose other parts are already decoded.
func decodeTables(p *solver.Plan, content []byte, layout string) error {
	arrays, metadata, err := decodeArrays(content)
	if err != nil {
		return err
	}
	for key, want := range map[string]string{
		"format": Format, "layout": layout, "ep_size": strconv.Itoa(p.Placement.Ranks), "score_scale": strconv.Itoa(affinity.ScoreScale),
	} {
		if metadata[key] != want {
			return invalidf("%s: %s is %q; this plan needs %q", TablesFile, key, metadata[key], want)
		}
	}
	if p.Attention == placement.DataParallel {
		a, err := take(arrays, tokenRankScore, u16, p.Vocabulary, p.Placement.Ranks)
		if err != nil {
			return err
		}
		p.Ranks = &affinity.RankTable{Ranks: p.Placement.Ranks, Score: a.values}
		return decodeSeen(p, arrays)
	}
	if err := decodeTokenTable(p, arrays); err != nil {
		return err
	}
	if err := decodeSeen(p, arrays); err != nil {
		return err
	}
	if err := decodeTransitions(p, arrays); err != nil {
		return err
	}
	switch {
	case p.Forecast == solver.LookAhead:
		return decodeLookAhead(p, arrays, metadata)
	case p.Forecast == solver.LookBack:
		return decodeLookBack(p, arrays, metadata)
	case p.Forecast.Contextual():
		return decodeForecast(p, arrays, metadata)
	}
	return nil
}

// decodeTransitions decodes the transition table. Plans without this table are valid.
func decodeTransitions(p *solver.Plan, arrays map[string]array) error {
	layers, n := len(p.Placement.Layers), p.Placement.Ranks
	_, hasRank := arrays[transitionRank]
	_, hasConfidence := arrays[transitionConf]
	if !hasRank && !hasConfidence {
		return nil
	}
	ranks, err := take(arrays, transitionRank, rankDType(n), layers, n, n)
	if err != nil {
		return err
	}
	confidence, err := take(arrays, transitionConf, u16, layers, n, n)
	if err != nil {
		return err
	}
	if err := checkRanks(transitionRank, ranks, n); err != nil {
		return err
	}
	p.Transitions = &affinity.Transitions{Layers: layers, Ranks: n, Rank: ranks.values, Confidence: confidence.values}
	return nil
}

// decodeSeen decodes what the tables were made from. Plans of earlier versions do not contain it.
func decodeSeen(p *solver.Plan, arrays map[string]array) error {
	pairs, hasPairs := arrays[pairSeen]
	if _, hasTokens := arrays[tokenSeen]; !hasTokens && !hasPairs {
		return nil
	}
	tokens, err := take(arrays, tokenSeen, u16, (p.Vocabulary+15)/16)
	if err != nil {
		return err
	}
	if n := len(pairs.values); n == 0 || n&(n-1) != 0 {
		return invalidf("%s: tensor %q has shape %v; it must be a power of two", TablesFile, pairSeen, pairs.shape)
	}
	if pairs, err = take(arrays, pairSeen, u16, len(pairs.values)); err != nil {
		return err
	}
	p.Seen = &affinity.Seen{Tokens: tokens.values, Pairs: pairs.values}
	return nil
}

// checkRanks checks that a tensor contains valid ranks.
func checkRanks(name string, a array, ranks int) error {
	for _, rank := range a.values {
		if int(rank) >= ranks {
			return invalidf("%s: tensor %q contains rank %d; allowed is 0 to %d", TablesFile, name, rank, ranks-1)
		}
	}
	return nil
}

func decodeTokenTable(p *solver.Plan, arrays map[string]array) error {
	best := 0
	if a, ok := arrays[tokenRank]; ok && len(a.shape) == 3 {
		best = a.shape[2]
	}
	if best < 1 || best > p.Placement.Ranks {
		return invalidf("%s: tensor %q keeps %d ranks of each token; allowed is 1 to %d", TablesFile, tokenRank, best, p.Placement.Ranks)
	}
	layers := len(p.Placement.Layers)
	ranks, err := take(arrays, tokenRank, rankDType(p.Placement.Ranks), layers, p.Vocabulary, best)
	if err != nil {
		return err
	}
	scores, err := take(arrays, tokenScore, u16, layers, p.Vocabulary, best)
	if err != nil {
		return err
	}
	if err := checkRanks(tokenRank, ranks, p.Placement.Ranks); err != nil {
		return err
	}
	p.Tokens = &affinity.TokenTable{
		Layers: layers, Vocabulary: p.Vocabulary, Best: best, Ranks: p.Placement.Ranks, Rank: ranks.values, Score: scores.values,
	}
	return nil
}

func take(arrays map[string]array, name string, dtype checkpoint.DType, shape ...int) (array, error) {
	a, ok := arrays[name]
	if !ok {
		return a, invalidf("%s: tensor %q is missing", TablesFile, name)
	}
	if !slices.Equal(a.shape, shape) {
		return a, invalidf("%s: tensor %q has shape %v; this plan needs %v", TablesFile, name, a.shape, shape)
	}
	if a.dtype != dtype {
		return a, invalidf("%s: tensor %q is %s; this plan needs %s", TablesFile, name, a.dtype, dtype)
	}
	return a, nil
}

// decodeArrays reads the tensors with the element types that plans use, and skips all others.
func decodeArrays(content []byte) (map[string]array, map[string]string, error) {
	if len(content) < 8 {
		return nil, nil, invalidf("%s: %d bytes are too short for safetensors", TablesFile, len(content))
	}
	length := binary.LittleEndian.Uint64(content)
	if length > maxHeaderBytes {
		return nil, nil, invalidf("%s: the header has %d bytes; at most %d are read", TablesFile, length, maxHeaderBytes)
	}
	if length > uint64(len(content)-8) {
		return nil, nil, invalidf("%s: the file is truncated: its header has %d bytes", TablesFile, length)
	}
	header, err := checkpoint.ParseHeader(content[8 : 8+length])
	if err != nil {
		return nil, nil, invalidf("%s: %v", TablesFile, err)
	}
	data := content[8+length:]
	if header.DataBytes() != int64(len(data)) {
		return nil, nil, invalidf("%s: the file has %d bytes of data, but its header declares %d", TablesFile, len(data), header.DataBytes())
	}
	arrays := map[string]array{}
	for name, t := range header.Tensors {
		if !slices.Contains([]checkpoint.DType{u8, u16, i32, checkpoint.F32}, t.DType) {
			continue
		}
		a := array{dtype: t.DType}
		for _, d := range t.Shape {
			if d > math.MaxInt32 {
				return nil, nil, invalidf("%s: tensor %q has shape %v", TablesFile, name, t.Shape)
			}
			a.shape = append(a.shape, int(d))
		}
		a.read(data[t.Begin:t.End], int(t.Elements()))
		arrays[name] = a
	}
	return arrays, header.Metadata, nil
}
