// SPDX-License-Identifier: Apache-2.0

package cost

import "github.com/semmoe/operator/solver/dispatch"

// window measures the balance of the last requests after each arrival, from the first full window on. If there are
// fewer requests, they form one window.
type window struct {
	options       *Options
	ranks, layers int
	// load contains the latest request's tokens per rank, followed by its activations per layer and rank. sum is the sum
	// over the window.
	load []int32
	sum  []int
	// kept is a ring buffer of the loads of the window. A request with few tokens reaches few ranks and experts; only
	// its nonzero loads are kept.
	kept []keptLoad
	// arrived counts requests; tokens and experts are the sums of the imbalances so far.
	arrived         int
	tokens, experts float64
}

// keptLoad is the load of a request: either all values, or pairs of index and value. Values without a pair are 0.
type keptLoad struct {
	all, pairs []int32
}

func (k *keptLoad) addTo(sum []int, sign int) {
	for x, n := range k.all {
		sum[x] += sign * int(n)
	}
	for i := 0; i < len(k.pairs); i += 2 {
		sum[k.pairs[i]] += sign * int(k.pairs[i+1])
	}
}

func (k *keptLoad) keep(load []int32) {
	k.all, k.pairs = k.all[:0], k.pairs[:0]
	for x, n := range load {
		if n == 0 {
			continue
		}
		if 2*len(k.pairs) > len(load) { // pairs are slower to add, and save less than half of the memory
			k.all, k.pairs = append(k.all, load...), k.pairs[:0]
			return
		}
		k.pairs = append(k.pairs, int32(x), n)
	}
}

func newWindow(o *Options, requests, ranks, layers int) *window {
	width := (layers + 1) * ranks
	return &window{
		options: o, ranks: ranks, layers: layers, load: make([]int32, width), sum: make([]int, width),
		kept: make([]keptLoad, min(dispatch.Arrivals, requests)),
	}
}

// next returns the buffer for the load of the next request, and removes the oldest request from the window. measure
// must follow.
func (w *window) next() []int32 {
	w.kept[w.arrived%len(w.kept)].addTo(w.sum, -1)
	clear(w.load)
	return w.load
}

// measure adds the recorded load to the window.
func (w *window) measure() {
	latest := &w.kept[w.arrived%len(w.kept)]
	latest.keep(w.load)
	latest.addTo(w.sum, 1)
	w.arrived++
	if w.arrived < len(w.kept) {
		return
	}
	w.tokens += w.options.tokenImbalance(w.sum[:w.ranks])
	for l := range w.layers {
		w.experts += imbalance(w.sum[(l+1)*w.ranks:(l+2)*w.ranks]) / float64(w.layers)
	}
}

// means returns the mean imbalances over all windows, of tokens and of activations.
func (w *window) means() (tokens, experts float64) {
	windows := float64(w.arrived - len(w.kept) + 1)
	return w.tokens / windows, w.experts / windows
}
