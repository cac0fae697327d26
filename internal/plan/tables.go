package plan

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
)

// The tensors of tables.safetensors.
const (
	tokenRankScore = "token_rank_score"
	tokenRank      = "token_rank"
	tokenScore     = "token_score"
)

const (
	u8  checkpoint.DType = "U8"
	u16 checkpoint.DType = "U16"
)

// array is one tensor of unsigned integers.
type array struct {
	dtype  checkpoint.DType
	shape  []int
	values []uint16
}

func (a array) width() int {
	if a.dtype == u8 {
		return 1
	}
	return 2
}

// encodeTables writes the plan's forecast tables for the layout.
func encodeTables(p *solver.Plan, layout string) ([]byte, error) {
	metadata := map[string]string{
		"format": Format, "layout": layout, "ep_size": strconv.Itoa(p.Placement.Ranks), "score_scale": strconv.Itoa(affinity.ScoreScale),
	}
	arrays := map[string]array{}
	if p.Ranks != nil {
		arrays[tokenRankScore] = array{u16, []int{p.Ranks.Vocabulary(), p.Ranks.Ranks}, p.Ranks.Score}
	}
	if t := p.Tokens; t != nil {
		shape := []int{t.Layers, t.Vocabulary, t.Best}
		arrays[tokenRank] = array{rankDType(t.Ranks), shape, t.Rank}
		arrays[tokenScore] = array{u16, shape, t.Score}
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
	// Wide elements first, so that each tensor begins at a multiple of its element's size.
	names := slices.SortedFunc(maps.Keys(arrays), func(a, b string) int {
		return cmp.Or(arrays[b].width()-arrays[a].width(), cmp.Compare(a, b))
	})
	end := 0
	for _, name := range names {
		a := arrays[name]
		size := len(a.values) * a.width()
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
		for _, v := range arrays[name].values {
			if arrays[name].width() == 1 {
				out = append(out, byte(v))
			} else {
				out = binary.LittleEndian.AppendUint16(out, v)
			}
		}
	}
	return out, nil
}

// decodeTables adds the tables to a plan whose other parts are complete.
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
		a, err := take(arrays, tokenRankScore, p.Vocabulary, p.Placement.Ranks)
		p.Ranks = &affinity.RankTable{Ranks: p.Placement.Ranks, Score: a.values}
		return err
	}
	return decodeTokenTable(p, arrays)
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
	ranks, err := take(arrays, tokenRank, layers, p.Vocabulary, best)
	if err != nil {
		return err
	}
	scores, err := take(arrays, tokenScore, layers, p.Vocabulary, best)
	if err != nil {
		return err
	}
	for _, rank := range ranks.values {
		if int(rank) >= p.Placement.Ranks {
			return invalidf("%s: tensor %q names rank %d; allowed is 0 to %d", TablesFile, tokenRank, rank, p.Placement.Ranks-1)
		}
	}
	p.Tokens = &affinity.TokenTable{
		Layers: layers, Vocabulary: p.Vocabulary, Best: best, Ranks: p.Placement.Ranks, Rank: ranks.values, Score: scores.values,
	}
	return nil
}

func take(arrays map[string]array, name string, shape ...int) (array, error) {
	a, ok := arrays[name]
	if !ok {
		return a, invalidf("%s: tensor %q is missing", TablesFile, name)
	}
	if !slices.Equal(a.shape, shape) {
		return a, invalidf("%s: tensor %q has shape %v; this plan needs %v", TablesFile, name, a.shape, shape)
	}
	return a, nil
}

// decodeArrays reads the tensors of 8- and 16-bit unsigned integers and skips all others.
func decodeArrays(content []byte) (map[string]array, map[string]string, error) {
	if len(content) < 8 {
		return nil, nil, invalidf("%s: %d bytes are too short for safetensors", TablesFile, len(content))
	}
	length := binary.LittleEndian.Uint64(content)
	if length > uint64(len(content)-8) {
		return nil, nil, invalidf("%s: is truncated: the header alone needs %d bytes", TablesFile, length)
	}
	header, err := checkpoint.ParseHeader(content[8 : 8+length])
	if err != nil {
		return nil, nil, invalidf("%s: %v", TablesFile, err)
	}
	data := content[8+length:]
	if header.DataBytes() != int64(len(data)) {
		return nil, nil, invalidf("%s: holds %d bytes of data, its header needs %d", TablesFile, len(data), header.DataBytes())
	}
	arrays := map[string]array{}
	for name, t := range header.Tensors {
		if t.DType != u8 && t.DType != u16 {
			continue
		}
		a := array{dtype: t.DType}
		for _, d := range t.Shape {
			if d > math.MaxInt32 {
				return nil, nil, invalidf("%s: tensor %q has shape %v", TablesFile, name, t.Shape)
			}
			a.shape = append(a.shape, int(d))
		}
		raw := data[t.Begin:t.End]
		a.values = make([]uint16, t.Elements())
		for i := range a.values {
			if a.width() == 1 {
				a.values[i] = uint16(raw[i])
			} else {
				a.values[i] = binary.LittleEndian.Uint16(raw[2*i:])
			}
		}
		arrays[name] = a
	}
	return arrays, header.Metadata, nil
}
