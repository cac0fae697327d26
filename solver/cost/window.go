package cost

import "github.com/semmoe/operator/solver/dispatch"

// window measures the balance of the last requests after each arrival, from the first full window on. If there are
// fewer requests, they form one window.
type window struct {
	options       *Options
	ranks, layers int
	// loads is a ring buffer. Each entry contains a request's tokens per rank, followed by its activations per layer
	// and rank. sum is the sum over the window.
	loads [][]int32
	sum   []int
	// arrived counts requests; tokens and experts are the sums of the imbalances so far.
	arrived         int
	tokens, experts float64
}

func newWindow(o *Options, requests, ranks, layers int) *window {
	w := &window{options: o, ranks: ranks, layers: layers, loads: make([][]int32, min(dispatch.Arrivals, requests))}
	width := (layers + 1) * ranks
	for i := range w.loads {
		w.loads[i] = make([]int32, width)
	}
	w.sum = make([]int, width)
	return w
}

// next returns the buffer for the load of the next request, and removes the oldest request from the window. measure
// must follow.
func (w *window) next() []int32 {
	load := w.loads[w.arrived%len(w.loads)]
	for x, n := range load {
		w.sum[x] -= int(n)
	}
	clear(load)
	return load
}

// measure adds the recorded load to the window.
func (w *window) measure() {
	for x, n := range w.loads[w.arrived%len(w.loads)] {
		w.sum[x] += int(n)
	}
	w.arrived++
	if w.arrived < len(w.loads) {
		return
	}
	w.tokens += w.options.tokenImbalance(w.sum[:w.ranks])
	for l := range w.layers {
		w.experts += imbalance(w.sum[(l+1)*w.ranks:(l+2)*w.ranks]) / float64(w.layers)
	}
}

// means returns the mean imbalances over all windows, of tokens and of activations.
func (w *window) means() (tokens, experts float64) {
	windows := float64(w.arrived - len(w.loads) + 1)
	return w.tokens / windows, w.experts / windows
}
