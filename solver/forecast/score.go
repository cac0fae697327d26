// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"math"
	"sort"
	"sync"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

// Forecast scores the tokens of a trace. Only one goroutine at a time may score positions of one layer.
type Forecast struct {
	model  *Model
	tokens *affinity.TokenTable
	hosts  []affinity.Hosts
	trace  *trace.Trace
	layers []layerScores
	// scratch contains values of type *scratch, one per concurrently scored request.
	scratch sync.Pool
}

// layerScores contains the scores of the most recent request of a layer, until its last position has been scored.
type layerScores struct {
	begin, end int
	scores     []float32
}

// scratch contains the intermediate data of scoring a request, many times the size of its scores.
type scratch struct {
	evidence *evidence
	routed   []float32
}

// Bind returns the scores of the model for a trace. hosts are the placement's, by layer; they map routes to ranks.
func (m *Model) Bind(tokens *affinity.TokenTable, hosts []affinity.Hosts, of *trace.Trace) *Forecast {
	f := &Forecast{model: m, tokens: tokens, hosts: hosts, trace: of, layers: make([]layerScores, m.Layers)}
	f.scratch.New = func() any { return &scratch{evidence: newEvidence(m.Ranks)} }
	return f
}

// Score fills dst with the expected local share on each rank of the token at a position of the trace, in a MoE layer
// (index among the MoE layers).
func (f *Forecast) Score(dst []float32, layer, position int) {
	l := &f.layers[layer]
	if position < l.begin || position >= l.end {
		f.scoreRequest(layer, position)
	}
	at := (position - l.begin) * f.model.Ranks
	copy(dst, l.scores[at:at+f.model.Ranks])
	if position == l.end-1 {
		*l = layerScores{} // positions are scored in order, layer by layer; a finished layer frees its scores
	}
}

// scoreRequest scores all tokens of the request that contains the position.
func (f *Forecast) scoreRequest(layer, position int) {
	t, m, l := f.trace, f.model, &f.layers[layer]
	by := f.scratch.Get().(*scratch)
	defer f.scratch.Put(by)
	r := sort.Search(t.Requests(), func(r int) bool { return int(t.Offsets[r+1]) > position })
	l.begin, l.end = int(t.Offsets[r]), int(t.Offsets[r+1])
	req := request{tokens: t.Request(r)}
	if m.History {
		by.routed = routedShares(by.routed, t, f.hosts[layer], m.Ranks, layer, l.begin, l.end)
		req.routed = by.routed
	}
	by.evidence.gather(req, &storedRows{m, f.tokens, layer, req.tokens}, m.History)
	if n := len(req.tokens) * m.Ranks; cap(l.scores) < n {
		l.scores = make([]float32, n)
	}
	l.scores = l.scores[:len(req.tokens)*m.Ranks]
	w := m.layer(layer)
	var expertRows []int32
	for i := range req.tokens {
		expertRows = m.earlierExperts(expertRows[:0], t, layer, l.begin+i)
		w.shares(l.scores[i*m.Ranks:(i+1)*m.Ranks], by.evidence, i, expertRows)
	}
}

// routedShares returns the shares per rank of the activations of positions begin to end.
func routedShares(dst []float32, t *trace.Trace, hosts affinity.Hosts, ranks, layer, begin, end int) []float32 {
	n := (end - begin) * ranks
	if cap(dst) < n {
		dst = make([]float32, n)
	}
	dst = dst[:n]
	clear(dst)
	for p := begin; p < end; p++ {
		row := dst[(p-begin)*ranks : (p-begin+1)*ranks]
		total := float32(0)
		for _, expert := range t.Row(p, layer) {
			for _, rank := range hosts[expert] {
				row[rank]++
				total++
			}
		}
		for rank := range row {
			row[rank] /= total
		}
	}
	return dst
}

// earlierExperts appends the rows of Expert that apply to a position in a layer.
func (m *Model) earlierExperts(dst []int32, t *trace.Trace, layer, position int) []int32 {
	for back := 1; back <= min(lookBack, layer); back++ {
		for k, expert := range t.Row(position, layer-back) {
			dst = append(dst, int32(m.expertRow(back, k, int(expert))))
		}
	}
	return dst
}

// storedRows reads the tables of a plan.
type storedRows struct {
	model    *Model
	table    *affinity.TokenTable
	layer    int
	sequence []int32
}

func (s *storedRows) token(dst []float32, id int32) int {
	s.table.ScoreToken(dst, s.layer, id)
	if id < 0 || int(id) >= s.model.Vocabulary {
		return 0
	}
	return int(s.model.TokenLevel[id])
}

func (s *storedRows) pair(dst []float32, index int) int {
	if index == 0 {
		return 0
	}
	pair := s.model.pair(s.sequence[index-1], s.sequence[index])
	if pair < 0 {
		return 0
	}
	at := (s.layer*s.model.Pairs() + pair) * s.model.Ranks
	for rank, score := range s.model.PairScore[at : at+s.model.Ranks] {
		dst[rank] = float32(score) / affinity.ScoreScale
	}
	return int(s.model.PairLevel[pair])
}

// weights contains the weights of one layer.
type weights struct {
	ranks                int
	vector, bias, expert []float32
}

func (m *Model) layer(l int) weights {
	n := ExpertRows(m.TopK, m.Experts) * m.Ranks
	return weights{
		m.Ranks, m.Vector[l*VectorWeights : (l+1)*VectorWeights], m.Bias[l*m.Ranks : (l+1)*m.Ranks], m.Expert[l*n : (l+1)*n],
	}
}

// shares fills dst with the softmax of all evidence for one token.
func (w *weights) shares(dst []float32, e *evidence, i int, expertRows []int32) {
	copy(dst, w.bias)
	for source, index := range e.weight[i*sources : (i+1)*sources] {
		if index < 0 {
			continue
		}
		weight := w.vector[index]
		at := (i*sources + source) * w.ranks
		for rank, v := range e.logs[at : at+w.ranks] {
			dst[rank] += weight * v
		}
	}
	for _, row := range expertRows {
		at := int(row) * w.ranks
		for rank, v := range w.expert[at : at+w.ranks] {
			dst[rank] += v
		}
	}
	softmax(dst)
}

func softmax(values []float32) {
	highest := values[0]
	for _, v := range values[1:] {
		highest = max(highest, v)
	}
	total := float32(0)
	for i, v := range values {
		values[i] = float32(math.Exp(float64(v - highest)))
		total += values[i]
	}
	for i := range values {
		values[i] /= total
	}
}
