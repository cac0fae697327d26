// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// shrinkage is the weight of the prior in a token's row, pairShrinkage the weight of the token's row in a pair's
	// row, in occurrences.
	shrinkage     = 1
	pairShrinkage = 2
	// minPairs is the minimum number of occurrences of a stored pair.
	minPairs = 2
	// passes is the number of passes over the samples. rate is the first step size of a weight. Steps shrink with
	// accumulated gradients, and linearly to 0 over the passes.
	passes = 4
	rate   = 0.12
	// maxSamples and maxCells (samples × ranks) bound time and memory of training. Above them, whole documents are
	// omitted from the samples, but not from the tables.
	maxSamples = 200_000
	maxCells   = 16 * maxSamples
)

// Train fits a model to the listed requests for a placement, given by its hosts in each layer.
func Train(ctx context.Context, t *trace.Trace, requests []int, hosts []affinity.Hosts, ranks int, history bool, seed uint64, progress func(done, total int)) (*Model, error) {
	m := &Model{
		History: history, Ranks: ranks, Layers: len(t.Model.Layers), Experts: t.Model.Experts, TopK: t.Model.TopK, Vocabulary: t.Model.Vocabulary,
	}
	c := newCorpus(t.Subset(requests))
	m.countPairs(c)
	m.Vector = make([]float32, m.Layers*VectorWeights)
	m.Bias = make([]float32, m.Layers*ranks)
	m.Expert = make([]float32, m.Layers*ExpertRows(m.TopK, m.Experts)*ranks)
	m.PairScore = make([]uint16, m.Layers*m.Pairs()*ranks)
	done := affinity.Counter(m.Layers, progress)
	err := affinity.Parallel(ctx, m.Layers, func(l int) {
		counted := newCountedRows(m, c, hosts[l], l)
		m.storePairs(counted, l)
		trainLayer(ctx, m, counted, l, seed)
		done()
	})
	return m, err
}

// corpus contains the documents of the profile with their positions.
type corpus struct {
	trace     *trace.Trace
	documents [][]int
	// pairOf is the index of the pair that ends at a position, or -1 [positions of the trace].
	pairOf []int32
}

func newCorpus(t *trace.Trace) *corpus {
	c := &corpus{trace: t}
	index := map[int32]int{}
	for r := range t.Requests() {
		i, known := index[t.Documents[r]]
		if !known {
			i = len(c.documents)
			index[t.Documents[r]] = i
			c.documents = append(c.documents, nil)
		}
		c.documents[i] = append(c.documents[i], r)
	}
	return c
}

// each calls do for every position of a document, with its index in its request.
func (c *corpus) each(document []int, do func(position, index int)) {
	for _, r := range document {
		begin := int(c.trace.Offsets[r])
		for i := range c.trace.Length(r) {
			do(begin+i, i)
		}
	}
}

// countPairs fills the levels of tokens and the index of pairs.
func (m *Model) countPairs(c *corpus) {
	t := c.trace
	tokens := make([]int, m.Vocabulary)
	pairs := map[[2]int32]int{}
	for _, document := range c.documents {
		c.each(document, func(p, index int) {
			tokens[t.Tokens[p]]++
			if index > 0 {
				pairs[[2]int32{t.Tokens[p], t.Tokens[p-1]}]++
			}
		})
	}
	m.TokenLevel = make([]uint8, m.Vocabulary)
	for id, n := range tokens {
		m.TokenLevel[id] = uint8(level(n))
	}
	var kept [][2]int32
	for pair, n := range pairs {
		if n >= minPairs {
			kept = append(kept, pair)
		}
	}
	slices.SortFunc(kept, func(a, b [2]int32) int { return slices.Compare(a[:], b[:]) })
	m.PairStart = make([]int32, m.Vocabulary+1)
	for _, pair := range kept {
		m.PairStart[pair[0]+1]++
		m.PairPrevious = append(m.PairPrevious, pair[1])
		m.PairLevel = append(m.PairLevel, uint8(level(pairs[pair])))
	}
	for id := range m.Vocabulary {
		m.PairStart[id+1] += m.PairStart[id]
	}
	c.pairOf = make([]int32, len(t.Tokens))
	for _, document := range c.documents {
		c.each(document, func(p, index int) {
			c.pairOf[p] = -1
			if index > 0 {
				c.pairOf[p] = int32(m.pair(t.Tokens[p-1], t.Tokens[p]))
			}
		})
	}
}

// tokenRows contains the rows of token ids in one layer as sums over positions, from which documents can be removed.
type tokenRows struct {
	corpus *corpus
	ranks  int
	// routed are the shares per rank of each position's activations [positions of the trace, ranks].
	routed []float32
	// tokenSum are their sums by token id, tokenCount the numbers of occurrences.
	tokenSum, tokenCount []float32
	// prior is the mean over all positions. It does not change when documents are removed.
	prior []float32
}

func newTokenRows(c *corpus, hosts affinity.Hosts, ranks, layer int) *tokenRows {
	vocabulary := c.trace.Model.Vocabulary
	r := &tokenRows{
		corpus: c, ranks: ranks, routed: routedShares(nil, c.trace, hosts, ranks, layer, 0, len(c.trace.Tokens)),
		tokenSum: make([]float32, vocabulary*ranks), tokenCount: make([]float32, vocabulary), prior: make([]float32, ranks),
	}
	n := float32(0)
	for _, document := range c.documents {
		r.count(document, 1)
		c.each(document, func(p, _ int) {
			decayInto(r.prior, r.routed[p*r.ranks:(p+1)*r.ranks], 1)
			n++
		})
	}
	for rank := range r.prior {
		r.prior[rank] /= max(n, 1)
	}
	return r
}

// position returns the shares per rank of a position's activations.
func (r *tokenRows) position(p int) []float32 { return r.routed[p*r.ranks : (p+1)*r.ranks] }

// count adds a document to the sums (sign 1) or removes it (sign -1).
func (r *tokenRows) count(document []int, sign float32) {
	r.corpus.each(document, func(p, _ int) {
		id := int(r.corpus.trace.Tokens[p])
		r.tokenCount[id] += sign
		add(r.tokenSum[id*r.ranks:(id+1)*r.ranks], r.position(p), sign)
	})
}

func add(sum, row []float32, weight float32) {
	for i, v := range row {
		sum[i] += weight * v
	}
}

func (r *tokenRows) token(dst []float32, id int32) int {
	n := r.tokenCount[id]
	sum := r.tokenSum[int(id)*r.ranks : (int(id)+1)*r.ranks]
	for rank := range dst {
		dst[rank] = (max(sum[rank], 0) + shrinkage*r.prior[rank]) / (n + shrinkage)
	}
	return level(int(n))
}

// countedRows contains the tables of one layer of a Model as sums.
type countedRows struct {
	tokenRows
	model *Model
	// pairSum and pairCount are the sums and numbers of occurrences of pairs.
	pairSum, pairCount []float32
	// begin is the first position of the current request.
	begin int
	base  []float32
}

func newCountedRows(m *Model, c *corpus, hosts affinity.Hosts, layer int) *countedRows {
	r := &countedRows{
		tokenRows: *newTokenRows(c, hosts, m.Ranks, layer), model: m,
		pairSum: make([]float32, m.Pairs()*m.Ranks), pairCount: make([]float32, m.Pairs()), base: make([]float32, m.Ranks),
	}
	for _, document := range c.documents {
		r.countPairs(document, 1)
	}
	return r
}

// count adds a document to the sums (sign 1) or takes it out (sign -1).
func (r *countedRows) count(document []int, sign float32) {
	r.tokenRows.count(document, sign)
	r.countPairs(document, sign)
}

func (r *countedRows) countPairs(document []int, sign float32) {
	r.corpus.each(document, func(p, _ int) {
		if pair := int(r.corpus.pairOf[p]); pair >= 0 {
			r.pairCount[pair] += sign
			add(r.pairSum[pair*r.ranks:(pair+1)*r.ranks], r.position(p), sign)
		}
	})
}

func (r *countedRows) pair(dst []float32, index int) int {
	position := r.begin + index
	pair := int(r.corpus.pairOf[position])
	if pair < 0 || r.pairCount[pair] < 1 {
		return 0
	}
	r.token(r.base, r.corpus.trace.Tokens[position])
	r.pairShares(dst, pair)
	return level(int(r.pairCount[pair]))
}

// pairShares shrinks a pair's sums towards its token's row, which is in r.base.
func (r *countedRows) pairShares(dst []float32, pair int) {
	n := r.pairCount[pair]
	sum := r.pairSum[pair*r.ranks : (pair+1)*r.ranks]
	for rank := range dst {
		dst[rank] = (max(sum[rank], 0) + pairShrinkage*r.base[rank]) / (n + pairShrinkage)
	}
}

// storePairs writes the pairs' rows in the form of a plan.
func (m *Model) storePairs(r *countedRows, layer int) {
	shares := make([]float32, m.Ranks)
	for id := range int32(m.Vocabulary) {
		r.token(r.base, id)
		for pair := m.PairStart[id]; pair < m.PairStart[id+1]; pair++ {
			r.pairShares(shares, int(pair))
			at := (layer*m.Pairs() + int(pair)) * m.Ranks
			for rank, share := range shares {
				m.PairScore[at+rank] = uint16(math.Round(float64(min(share, 1)) * affinity.ScoreScale))
			}
		}
	}
}

// samples contains the evidence of every training position.
type samples struct {
	evidence
	positions []int32
}

// trainLayer fits the weights of one layer.
func trainLayer(ctx context.Context, m *Model, r *countedRows, layer int, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 0x666f726563617374^uint64(layer)))
	s := gatherSamples(m, r, random)
	w := m.layer(layer)
	for l := range levels {
		w.vector[tokenSource*levels+l] = 1
	}
	optimiser := newOptimiser(w)
	order := make([]int, len(s.positions))
	for i := range order {
		order[i] = i
	}
	shares := make([]float32, m.Ranks)
	var expertRows []int32
	total := float32(passes * len(order))
	step := 0
	for range passes {
		if ctx.Err() != nil {
			return
		}
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			position := int(s.positions[i])
			expertRows = m.earlierExperts(expertRows[:0], r.corpus.trace, layer, position)
			w.shares(shares, &s.evidence, i, expertRows)
			for rank, share := range r.routed[position*m.Ranks : (position+1)*m.Ranks] {
				shares[rank] -= share
			}
			optimiser.rate = rate * (1 - float32(step)/total)
			optimiser.descend(shares, &s.evidence, i, expertRows)
			step++
		}
	}
}

// gatherSamples collects the evidence of every document with its own counts removed from the tables.
func gatherSamples(m *Model, r *countedRows, random *rand.Rand) *samples {
	s := &samples{evidence: *newEvidence(m.Ranks)}
	one := newEvidence(m.Ranks)
	t := r.corpus.trace
	for _, d := range random.Perm(len(r.corpus.documents)) {
		document := r.corpus.documents[d]
		if len(s.positions) >= min(maxSamples, maxCells/m.Ranks) {
			break
		}
		r.count(document, -1)
		for _, req := range document {
			begin, end := int(t.Offsets[req]), int(t.Offsets[req+1])
			r.begin = begin
			one.gather(request{t.Request(req), r.routed[begin*m.Ranks : end*m.Ranks]}, r, m.History)
			s.logs = append(s.logs, one.logs...)
			s.weight = append(s.weight, one.weight...)
			for p := begin; p < end; p++ {
				s.positions = append(s.positions, int32(p))
			}
		}
		r.count(document, 1)
	}
	return s
}

// optimiser is stochastic gradient descent with a step size per weight that shrinks with accumulated gradients
// (AdaGrad).
type optimiser struct {
	w                    weights
	vector, bias, expert []float32
	rate                 float32
}

func newOptimiser(w weights) *optimiser {
	return &optimiser{w, make([]float32, len(w.vector)), make([]float32, len(w.bias)), make([]float32, len(w.expert)), rate}
}

// descend takes one step along a sample's gradient with respect to the scores before the softmax.
func (o *optimiser) descend(gradient []float32, e *evidence, i int, expertRows []int32) {
	for rank, g := range gradient {
		o.step(&o.w.bias[rank], &o.bias[rank], g)
	}
	for source, index := range e.weight[i*sources : (i+1)*sources] {
		if index < 0 {
			continue
		}
		at := (i*sources + source) * o.w.ranks
		g := float32(0)
		for rank, v := range e.logs[at : at+o.w.ranks] {
			g += gradient[rank] * v
		}
		o.step(&o.w.vector[index], &o.vector[index], g)
	}
	for _, row := range expertRows {
		at := int(row) * o.w.ranks
		w, sum := o.w.expert[at:at+o.w.ranks], o.expert[at:at+o.w.ranks]
		for rank, g := range gradient {
			sum[rank] += g * g
			w[rank] -= o.rate * g * rsqrt(sum[rank])
		}
	}
}

func (o *optimiser) step(weight, squares *float32, g float32) {
	*squares += g * g
	*weight -= o.rate * g * rsqrt(*squares)
}

// rsqrt returns 1/√x; a constant added to x limits the first steps.
func rsqrt(x float32) float32 { return float32(1 / math.Sqrt(float64(x)+0.1)) }
