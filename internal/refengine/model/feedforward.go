// SPDX-License-Identifier: Apache-2.0

package model

// moeScratch is the routing of one MoE layer for the rows of a step.
type moeScratch struct {
	// logits is [rows][Experts]. chosen and weight are [rows][TopK], in the order of the gate weights.
	logits []float32
	chosen []int
	weight []float32
	// byExpert lists the activations (row*TopK + k) by expert. The activations of expert e start at start[e].
	byExpert, start []int
	// blocks splits the lists into blocks of at most blockRows activations of one expert.
	blocks []expertBlock
	// outputs contains the expert output of each activation, [rows*TopK][Hidden].
	outputs []float32
}

type expertBlock struct{ expert, from, to int }

// feedForward adds the output of the experts of layer l, or of its dense network, to the residual stream.
func (r *Runner) feedForward(l int) {
	layer := &r.model.layers[l]
	r.normalise(layer.postNorm)
	if layer.gate == nil {
		r.dense(layer)
		return
	}
	r.route(l)
	r.groupByExpert()
	r.runExperts(layer)
	r.combine()
}

// route scores the experts for every row, selects TopK of them and writes them to the routes.
func (r *Runner) route(l int) {
	m, s, n := r.model, &r.moe, len(r.rows)
	grow(&s.logits, n*m.Experts)
	grow(&s.chosen, n*m.TopK)
	grow(&s.weight, n*m.TopK)
	r.linear(s.logits, r.normed, n, *m.layers[l].gate)
	r.eachBlock(n, func(_ *workspace, from, to int) {
		for i := from; i < to; i++ {
			chosen, weight := s.chosen[i*m.TopK:][:m.TopK], s.weight[i*m.TopK:][:m.TopK]
			m.choose(s.logits[i*m.Experts:][:m.Experts], chosen, weight)
			routes := r.rows[i].chunk.Routes[(r.rows[i].index*m.Layers+l)*m.TopK:]
			for k, expert := range chosen {
				routes[k] = uint16(expert)
			}
		}
	})
}

// choose selects the TopK experts with the largest probability and computes their weights. It overwrites the logits.
func (m *Model) choose(logits []float32, chosen []int, weight []float32) {
	topExperts(logits, chosen, weight)
	if !m.NormTopK {
		return
	}
	var total float32
	for _, w := range weight {
		total += w
	}
	for k := range weight {
		weight[k] /= total
	}
}

// topExperts fills chosen with the experts of largest probability in descending order, with the lower index first
// among equal ones. It overwrites the logits with probabilities.
func topExperts(logits []float32, chosen []int, probability []float32) {
	sum := softmax(logits)
	for k := range chosen {
		best := 0
		for e, p := range logits {
			if p > logits[best] {
				best = e
			}
		}
		chosen[k], probability[k] = best, logits[best]/sum
		logits[best] = -1 // below every probability, so that it is not selected again
	}
}

// groupByExpert sorts the activations by expert (counting sort) and splits them into blocks.
func (r *Runner) groupByExpert() {
	s, experts := &r.moe, r.model.Experts
	grow(&s.start, experts+1)
	grow(&s.byExpert, len(s.chosen))
	clear(s.start)
	for _, expert := range s.chosen {
		s.start[expert+1]++
	}
	for e := range experts {
		s.start[e+1] += s.start[e]
	}
	for activation, expert := range s.chosen {
		s.byExpert[s.start[expert]] = activation
		s.start[expert]++
	}
	// Filling has moved every start to the start of the next expert, from which the blocks are computed.
	s.blocks = s.blocks[:0]
	from := 0
	for e := range experts {
		for ; from < s.start[e]; from += blockRows {
			s.blocks = append(s.blocks, expertBlock{e, from, min(from+blockRows, s.start[e])})
		}
		from = s.start[e]
	}
}

// runExperts computes the expert of every activation.
func (r *Runner) runExperts(layer *layer) {
	m, s := r.model, &r.moe
	grow(&s.outputs, len(s.chosen)*m.Hidden)
	r.parallel(len(s.blocks), func(ws *workspace, task int) {
		block := s.blocks[task]
		activations := s.byExpert[block.from:block.to]
		for i, activation := range activations {
			copy(ws.input[i*m.Hidden:][:m.Hidden], r.normed[activation/m.TopK*m.Hidden:])
		}
		output := ws.run(layer.experts[block.expert], ws.input, len(activations))
		for i, activation := range activations {
			copy(s.outputs[activation*m.Hidden:][:m.Hidden], output[i*m.Hidden:])
		}
	})
}

// combine adds the weighted outputs of each row's experts, in the order of the gate weights, to the residual stream.
func (r *Runner) combine() {
	m, s := r.model, &r.moe
	r.eachBlock(len(r.rows), func(_ *workspace, from, to int) {
		for i := from; i < to; i++ {
			sum := r.normed[i*m.Hidden:][:m.Hidden]
			clear(sum)
			for k, weight := range s.weight[i*m.TopK:][:m.TopK] {
				output := s.outputs[(i*m.TopK+k)*m.Hidden:][:m.Hidden]
				for d, v := range output {
					sum[d] += float32(weight * v)
				}
			}
			add(r.residual[i*m.Hidden:][:m.Hidden], sum)
		}
	})
}

// dense computes the network of a dense layer for all rows.
func (r *Runner) dense(layer *layer) {
	hidden := r.model.Hidden
	r.eachBlock(len(r.rows), func(ws *workspace, from, to int) {
		output := ws.run(layer.experts[0], r.normed[from*hidden:], to-from)
		add(r.residual[from*hidden:to*hidden], output)
	})
}

// run computes a network for n rows. The result lies in the workspace until its next use.
func (ws *workspace) run(f ffn, x []float32, n int) []float32 {
	width, hidden := f.gate.rows, f.gate.cols
	multiply(ws.gated, width, x, hidden, n, f.gate.packed, width, hidden)
	multiply(ws.upped, width, x, hidden, n, f.up.packed, width, hidden)
	gated := ws.gated[:n*width]
	for i, v := range gated {
		gated[i] = silu(v) * ws.upped[i]
	}
	multiply(ws.output, hidden, gated, width, n, f.down.packed, hidden, width)
	return ws.output
}
