// SPDX-License-Identifier: Apache-2.0

package placement

import "math"

// Clock models the time of a MoE layer for the objective Time.
type Clock struct {
	// exchange is the time in microseconds of one fair share of activations on the busiest rank. compute[i] is the time
	// of the experts if the slowest rank computes 1+i·loadStep fair shares.
	exchange float64
	compute  []float64
	// Windows contains the activations of each expert in samples of tokens that are computed together, with equal
	// totals [MoE layers][windows × experts]. If it is nil, the profile's totals are the only window.
	Windows [][]float32
	// MeanExchange is the weight, from 0 to 1, of the mean exchange of all ranks; the rest is that of the busiest rank of
	// each window. The ranks of requests are harder to predict than those of tokens: which rank will be the busiest one
	// is known only in part.
	MeanExchange float64
}

// loadStep is the resolution of tabulated compute times, and maxLoad the maximum tabulated load.
const (
	loadStep = 0.01
	maxLoad  = 16
)

// NewClock tabulates a time model of a layer. microseconds returns the time in microseconds if the busiest rank
// exchanges, and the slowest rank computes, the given multiples of a fair share of the activations. The time must be
// affine in the exchange.
func NewClock(microseconds func(exchange, load float64) float64) *Clock {
	c := &Clock{exchange: microseconds(1, 1) - microseconds(0, 1)}
	for i := range int(maxLoad/loadStep) + 2 {
		c.compute = append(c.compute, microseconds(0, 1+float64(i)*loadStep))
	}
	return c
}

// computing returns the time of the layer without the exchange of activations.
func (c *Clock) computing(load float64) float64 {
	at := min(max(load-1, 0)/loadStep, maxLoad/loadStep)
	i := int(at)
	return c.compute[i] + (at-float64(i))*(c.compute[i+1]-c.compute[i])
}

// grouped returns the clock for groups of size consecutive experts.
func (c *Clock) grouped(size int) *Clock {
	to := *c
	to.Windows = make([][]float32, len(c.Windows))
	for l, loads := range c.Windows {
		to.Windows[l] = make([]float32, len(loads)/size)
		for i, load := range loads {
			to.Windows[l][i/size] += load
		}
	}
	return &to
}

// timing is a placement of one layer during a search by time, for given ranks of the tokens.
type timing struct {
	clock *Clock
	ranks int
	// weight contains the activations of each expert by the tokens of each rank [experts × ranks].
	weight []float32
	rankOf []int
	// unit converts microseconds to local activations.
	unit float64
	// total is the number of all activations. sent are those of each rank's tokens, computed those of its experts,
	// local those in both.
	total                 float64
	sent, computed, local []float64
	// windows are the loads of the experts in each window as multiples of a rank's fair share [experts × windows]. on
	// are the loads of the ranks [ranks × windows]. A swap reads all windows of two experts and of two ranks.
	windows []float32
	on      []float64
	value   float64
	// slowest and busiest are the ranks with the highest load and with the largest exchange in each window. exchanged is
	// the exchange of all ranks on the profile.
	slowest, busiest []highest
	exchanged        float64
	// others are the highest values without two ranks, computed when they are first needed [ranks × ranks]. swaps is
	// the number of swaps, for which they are valid.
	others []others
	swaps  int
	// loads are the activations of each expert.
	loads []float64
}

func newTiming(c *Clock, layer int, weight []float32, rankOf []int, ranks int) *timing {
	experts := len(rankOf)
	t := &timing{
		clock: c, ranks: ranks, weight: weight, rankOf: rankOf,
		sent: make([]float64, ranks), computed: make([]float64, ranks), local: make([]float64, ranks), loads: make([]float64, experts),
	}
	for e, own := range rankOf {
		for rank, w := range weight[e*ranks : (e+1)*ranks] {
			t.loads[e] += float64(w)
			t.sent[rank] += float64(w)
			t.total += float64(w)
		}
		t.computed[own] += t.loads[e]
		t.local[own] += float64(weight[e*ranks+own])
	}
	t.total = max(t.total, 1)
	t.unit = t.total / max(c.exchange, 1e-9)
	windows := make([]float32, experts)
	for e, load := range t.loads {
		windows[e] = float32(load)
	}
	if c.Windows != nil {
		windows = c.Windows[layer]
	}
	t.windows = make([]float32, len(windows))
	t.on = make([]float64, len(windows)/experts*ranks)
	n := len(windows) / experts
	for w := range n {
		of, sum := windows[w*experts:(w+1)*experts], float32(0)
		for _, load := range of {
			sum += load
		}
		for e, load := range of {
			t.windows[e*n+w] = load * float32(ranks) / max(sum, 1)
			t.on[rankOf[e]*n+w] += float64(t.windows[e*n+w])
		}
	}
	t.slowest, t.busiest = make([]highest, n), make([]highest, n)
	t.rank()
	t.value = t.current()
	return t
}

// others are the loads and exchanges of the ranks other than two ranks p and q.
type others struct {
	swaps int
	// load and exchange are the highest values in each window.
	load, exchange []float64
	// leastLoad and leastExchange are lower bounds of the mean highest load and exchange after any swap between p and q,
	// and shared is half of the mean load of both, which no swap changes.
	leastLoad, leastExchange, shared float64
}

// without returns the highest loads and exchanges without two ranks.
func (t *timing) without(p, q int) *others {
	n := len(t.slowest)
	if t.others == nil {
		t.others = make([]others, t.ranks*t.ranks)
	}
	o := &t.others[min(p, q)*t.ranks+max(p, q)]
	if o.load != nil && o.swaps == t.swaps {
		return o
	}
	if o.load == nil {
		o.load = make([]float64, n)
		if t.clock.MeanExchange < 1 {
			o.exchange = make([]float64, n)
		}
	}
	o.swaps, o.leastLoad, o.leastExchange, o.shared = t.swaps, 0, 0, 0
	atP, atQ := t.on[p*n:(p+1)*n], t.on[q*n:(q+1)*n]
	for w := range o.load {
		o.load[w] = t.slowest[w].except(p, q)
		half := (atP[w] + atQ[w]) / 2
		o.leastLoad += max(o.load[w], half)
		o.shared += half
	}
	for w := range o.exchange {
		o.exchange[w] = t.busiest[w].except(p, q)
		o.leastExchange += o.exchange[w]
	}
	o.leastLoad, o.leastExchange, o.shared = o.leastLoad/float64(n), o.leastExchange/float64(n), o.shared/float64(n)
	return o
}

// highest contains the three ranks with the highest values, because a swap changes two of them.
type highest [3]struct {
	rank  int
	value float64
}

func newHighest() highest {
	var h highest
	for i := range h {
		h[i].rank = -1
	}
	return h
}

func (h *highest) add(rank int, value float64) {
	for i := range h {
		if h[i].rank < 0 || value > h[i].value {
			copy(h[i+1:], h[i:])
			h[i].rank, h[i].value = rank, value
			return
		}
	}
}

// except returns the highest value of the ranks other than two; 0 if there are no others.
func (h *highest) except(p, q int) float64 {
	for i := range h {
		if h[i].rank != p && h[i].rank != q {
			return h[i].value
		}
	}
	return 0
}

// exchange returns the activations that a rank sends or receives in a window, whichever is larger, as a multiple of a
// fair share. The rank's experts have the given load in the window; of their activations and of those of the rank's
// tokens, the same part is local in every window.
func (t *timing) exchange(rank int, load float64) float64 {
	return max(load*remote(t.computed[rank], t.local[rank]), remote(t.sent[rank], t.local[rank]))
}

// remote returns the part of activations that is not local.
func remote(all, local float64) float64 { return 1 - local/max(all, 1) }

// rank sorts the ranks by exchange and computation.
func (t *timing) rank() {
	t.exchanged = 0
	for rank := range t.ranks {
		t.exchanged += max(t.sent[rank], t.computed[rank]) - t.local[rank]
	}
	for w := range t.slowest {
		t.slowest[w], t.busiest[w] = newHighest(), newHighest()
		for rank := range t.ranks {
			load := t.on[rank*len(t.slowest)+w]
			t.slowest[w].add(rank, load)
			t.busiest[w].add(rank, t.exchange(rank, load))
		}
	}
}

func (t *timing) ranksOf() []int { return t.rankOf }

// windowed returns the means over windows of the slowest rank's load and of the busiest rank's exchange, as multiples of
// a fair share.
func (t *timing) windowed() (load, exchange float64) {
	for w := range t.slowest {
		load += t.slowest[w][0].value
		exchange += t.busiest[w][0].value
	}
	n := float64(len(t.slowest))
	return load / n, exchange / n
}

// microseconds returns the modelled time of the placement, by the busiest and the slowest rank.
func (t *timing) microseconds() float64 {
	load, exchange := t.windowed()
	return t.clock.exchange*exchange + t.clock.computing(load)
}

// current returns the value of the placement: the negative time in units of local activations.
func (t *timing) current() float64 {
	load, exchange := t.windowed()
	return t.valueOf(load, t.weighExchange(t.exchanged, exchange))
}

// valueOf returns the value for the load of the slowest rank and an exchange in activations. A fair share on every rank
// equals all activations.
func (t *timing) valueOf(load, exchange float64) float64 {
	return -exchange - t.unit*t.clock.computing(load)
}

// weighExchange returns the exchange in activations, given the exchange of all ranks, and that of the busiest rank as a
// multiple of a fair share.
func (t *timing) weighExchange(all, busiest float64) float64 {
	w := t.clock.MeanExchange
	return w*all + (1-w)*busiest*t.total
}

// valueAfter returns the value of the placement after two experts are swapped. If the value is at most floor, it may
// return any value up to floor.
func (t *timing) valueAfter(e, f int, floor float64) float64 {
	p, q, n := t.rankOf[e], t.rankOf[f], len(t.slowest)
	computedP, localP := t.after(e, f)
	computedQ, localQ := t.after(f, e)
	ofE, ofF, atP, atQ := t.windows[e*n:(e+1)*n], t.windows[f*n:(f+1)*n], t.on[p*n:(p+1)*n], t.on[q*n:(q+1)*n]
	load, others := 0.0, t.without(p, q)
	all := 0.0
	if t.clock.MeanExchange > 0 {
		all = t.exchanged
		all += max(t.sent[p], computedP) - localP - max(t.sent[p], t.computed[p]) + t.local[p]
		all += max(t.sent[q], computedQ) - localQ - max(t.sent[q], t.computed[q]) + t.local[q]
	}
	if t.clock.MeanExchange == 1 {
		if most := t.valueOf(others.leastLoad, all); most <= floor {
			return most
		}
		for w, most := range others.load {
			d := float64(ofF[w] - ofE[w])
			load += max(most, atP[w]+d, atQ[w]-d)
		}
		return t.valueOf(load/float64(n), all)
	}
	remoteP, remoteQ := remote(computedP, localP), remote(computedQ, localQ)
	sent, exchange := max(remote(t.sent[p], localP), remote(t.sent[q], localQ)), 0.0
	leastExchange := max(others.leastExchange, sent, others.shared*min(remoteP, remoteQ))
	if most := t.valueOf(others.leastLoad, t.weighExchange(all, leastExchange)); most <= floor {
		return most
	}
	for w, most := range others.load {
		d := float64(ofF[w] - ofE[w])
		onP, onQ := atP[w]+d, atQ[w]-d
		load += max(most, onP, onQ)
		exchange += max(others.exchange[w], onP*remoteP, onQ*remoteQ, sent)
	}
	return t.valueOf(load/float64(n), t.weighExchange(all, exchange/float64(n)))
}

// after returns the activations of the experts on e's rank after e is swapped for f, and those of them that are local.
func (t *timing) after(e, f int) (computed, local float64) {
	rank := t.rankOf[e]
	return t.computed[rank] + t.loads[f] - t.loads[e], t.local[rank] + float64(t.weight[f*t.ranks+rank]-t.weight[e*t.ranks+rank])
}

// minTimeGain is the minimum gain of a swap as a share of all activations. Smaller gains take long to find and do not
// generalize to later requests.
const minTimeGain = 1e-5

func (t *timing) gain(e, f int, floor float64) float64 {
	least := t.value + minTimeGain*t.total
	return t.valueAfter(e, f, least+floor) - least
}

func (t *timing) swap(e, f int) {
	t.value = t.valueAfter(e, f, math.Inf(-1))
	t.swaps++
	p, q, n := t.rankOf[e], t.rankOf[f], len(t.slowest)
	moved := t.loads[f] - t.loads[e]
	t.computed[p], t.computed[q] = t.computed[p]+moved, t.computed[q]-moved
	t.local[p] += float64(t.weight[f*t.ranks+p] - t.weight[e*t.ranks+p])
	t.local[q] += float64(t.weight[e*t.ranks+q] - t.weight[f*t.ranks+q])
	for w := range n {
		d := float64(t.windows[f*n+w] - t.windows[e*n+w])
		t.on[p*n+w] += d
		t.on[q*n+w] -= d
	}
	t.rankOf[e], t.rankOf[f] = q, p
	t.rank()
}

// lar returns the local activation rate, and imbalance the maximum load of a rank relative to the mean, on the profile.
func (t *timing) lar() float64 {
	sum := 0.0
	for _, local := range t.local {
		sum += local
	}
	return min(1, sum/t.total)
}

func (t *timing) imbalance() float64 {
	most := 0.0
	for _, load := range t.computed {
		most = max(most, load)
	}
	return most * float64(t.ranks) / t.total
}
