// SPDX-License-Identifier: Apache-2.0

package model

import "math"

// attention adds the output of layer l's attention to the residual stream and the rows' keys and values to their
// caches.
func (r *Runner) attention(l int) {
	m, layer, n := r.model, &r.model.layers[l], len(r.rows)
	r.normalise(layer.inputNorm)
	r.linear(r.query, r.normed, n, layer.query)
	r.linear(r.key, r.normed, n, layer.key)
	r.linear(r.value, r.normed, n, layer.value)
	r.eachBlock(n, func(_ *workspace, from, to int) {
		for i := from; i < to; i++ {
			r.rotate(r.query[i*m.Heads*m.HeadDim:][:m.Heads*m.HeadDim], layer.queryNorm, r.rows[i].position)
			r.rotate(r.key[i*m.KVHeads*m.HeadDim:][:m.KVHeads*m.HeadDim], layer.keyNorm, r.rows[i].position)
			r.store(l, i)
		}
	})
	// The caches now contain all rows of the step. Each row attends to the positions up to its own position.
	r.parallel(n*m.KVHeads, func(ws *workspace, task int) {
		r.attend(ws, l, task/m.KVHeads, task%m.KVHeads)
	})
	r.linear(r.normed, r.mixed, n, layer.output)
	add(r.residual, r.normed)
}

// rotate normalizes each head and applies the rotary embedding, which rotates the pairs (i, i + HeadDim/2).
func (r *Runner) rotate(heads, norm []float32, position int) {
	m := r.model
	half := m.HeadDim / 2
	cos, sin := m.cos[position*half:][:half], m.sin[position*half:][:half]
	for h := 0; h < len(heads); h += m.HeadDim {
		head := heads[h:][:m.HeadDim]
		rmsNorm(head, head, norm, m.RMSNormEps)
		for i := range half {
			a, b := head[i], head[i+half]
			head[i] = float32(a*cos[i]) - float32(b*sin[i])
			head[i+half] = float32(b*cos[i]) + float32(a*sin[i])
		}
	}
}

// store writes the key and value of row i to its cache.
func (r *Runner) store(l, i int) {
	width := r.model.KVHeads * r.model.HeadDim
	cache, position := r.rows[i].chunk.Cache, r.rows[i].position
	panel := cache.layers[l].keys[position/lanes*width*lanes+position%lanes:]
	for d, v := range r.key[i*width:][:width] {
		panel[d*lanes] = v
	}
	copy(cache.layers[l].values[position*width:], r.value[i*width:][:width])
}

// attend computes the attention of row i for the query heads that share one key-value head.
func (r *Runner) attend(ws *workspace, l, i, kvHead int) {
	m, row := r.model, r.rows[i]
	group, width := m.Heads/m.KVHeads, m.KVHeads*m.HeadDim
	cache := row.chunk.Cache.layers[l]
	keys := operand{cache.keys[kvHead*m.HeadDim*lanes:], lanes, width * lanes}
	values := operand{cache.values[kvHead*m.HeadDim:], width, lanes}
	at := i*m.Heads*m.HeadDim + kvHead*group*m.HeadDim
	length := row.position + 1

	multiply(ws.scores, length, r.query[at:], m.HeadDim, group, keys, length, m.HeadDim)
	scale := float32(1 / math.Sqrt(float64(m.HeadDim)))
	for h := range group {
		scores := ws.scores[h*length:][:length]
		for j := range scores {
			scores[j] *= scale
		}
		sum := softmax(scores)
		for j := range scores {
			scores[j] /= sum
		}
	}
	multiply(r.mixed[at:], m.HeadDim, ws.scores, length, group, values, m.HeadDim, length)
}

// add adds x to dst.
func add(dst, x []float32) {
	x = x[:len(dst)]
	for i := range dst {
		dst[i] += x[i]
	}
}
