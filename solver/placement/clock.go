package placement

// Clock models the time of an MoE layer, by which the objective Time judges placements.
type Clock struct {
	// exchange is the time in microseconds of one fair share of activations on the busiest rank. compute are the times of experts whose slowest rank
	// computes 1, 1+loadStep, 1+2·loadStep, ... fair shares.
	exchange float64
	compute  []float64
	// Windows are the activations of each expert in samples of tokens that are computed at a time, of the same total each
	// [MoE layers][windows × experts]. Where it is nil, the profile's totals are the only window.
	Windows [][]float32
	// Softness is the weight of the mean over ranks in the exchange that swaps lower, from 0 to 1; the rest is that of the busiest rank. The busiest
	// rank of the profile need not be that of later requests.
	Softness float64
}

// loadStep is the resolution of tabulated compute times, and maxLoad the largest tabulated load.
const (
	loadStep = 0.01
	maxLoad  = 16
)

// NewClock tabulates a model of the time in microseconds of a layer whose busiest rank exchanges, and whose slowest rank computes, the given
// multiples of a fair share of the activations. The time must be affine in the exchange.
func NewClock(microseconds func(exchange, load float64) float64) *Clock {
	c := &Clock{Softness: 0.5, exchange: microseconds(1, 1) - microseconds(0, 1)}
	for i := range int(maxLoad/loadStep) + 2 {
		c.compute = append(c.compute, microseconds(0, 1+float64(i)*loadStep))
	}
	return c
}

// computing is the time of everything but the activations' exchange.
func (c *Clock) computing(load float64) float64 {
	at := min(max(load-1, 0)/loadStep, maxLoad/loadStep)
	i := int(at)
	return c.compute[i] + (at-float64(i))*(c.compute[i+1]-c.compute[i])
}

// grouped is the clock of groups of size consecutive experts.
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

// timing is a placement of one layer under search for time, for given ranks of the tokens.
type timing struct {
	clock *Clock
	ranks int
	// weight are the activations of each expert by the tokens of each rank [experts × ranks].
	weight []float32
	rankOf []int
	// unit converts microseconds to activations that become local.
	unit float64
	// total are all activations. sent are those of each rank's tokens, computed those of its experts, local those in both.
	total                 float64
	sent, computed, local []float64
	// windows are the experts' loads in each window as multiples of a rank's fair share [windows × experts], on those of the ranks [windows × ranks].
	windows []float32
	on      []float64
	value   float64
	// busiest are the ranks that exchange most, exchanged is the sum over ranks; slowest are the ranks of the highest load of each window.
	busiest   highest
	exchanged float64
	slowest   []highest
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
	for w := range len(windows) / experts {
		of, sum := windows[w*experts:(w+1)*experts], float32(0)
		for _, load := range of {
			sum += load
		}
		for e, load := range of {
			t.windows[w*experts+e] = load * float32(ranks) / max(sum, 1)
			t.on[w*ranks+rankOf[e]] += float64(t.windows[w*experts+e])
		}
	}
	t.slowest = make([]highest, len(windows)/experts)
	t.rank()
	t.value = t.after(-1, -1)
	return t
}

// highest are the three ranks with the highest values: two of them may change.
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

// except is the highest value of the ranks other than two; 0 where there are no others.
func (h *highest) except(p, q int) float64 {
	for i := range h {
		if h[i].rank != p && h[i].rank != q {
			return h[i].value
		}
	}
	return 0
}

// exchange is what a rank sends, or receives if that is more.
func (t *timing) exchange(rank int) float64 {
	return max(t.sent[rank], t.computed[rank]) - t.local[rank]
}

// rank sorts the ranks by what they exchange and compute.
func (t *timing) rank() {
	t.busiest, t.exchanged = newHighest(), 0
	for rank := range t.ranks {
		x := t.exchange(rank)
		t.busiest.add(rank, x)
		t.exchanged += x
	}
	for w := range t.slowest {
		t.slowest[w] = newHighest()
		for rank, load := range t.on[w*t.ranks : (w+1)*t.ranks] {
			t.slowest[w].add(rank, load)
		}
	}
}

func (t *timing) ranksOf() []int { return t.rankOf }

// microseconds is the modelled time of the placement, of the busiest and the slowest rank.
func (t *timing) microseconds() float64 {
	return t.clock.exchange*t.busiest[0].value*float64(t.ranks)/t.total + t.clock.computing(t.load(-1, -1))
}

// load is the mean over windows of the slowest rank's load after two experts have changed places, if any.
func (t *timing) load(e, f int) float64 {
	experts, sum := len(t.rankOf), 0.0
	p, q := -1, -1
	if e >= 0 {
		p, q = t.rankOf[e], t.rankOf[f]
	}
	for w := range t.slowest {
		most := t.slowest[w].except(p, q)
		if e >= 0 {
			d := float64(t.windows[w*experts+f] - t.windows[w*experts+e])
			most = max(most, t.on[w*t.ranks+p]+d, t.on[w*t.ranks+q]-d)
		}
		sum += most
	}
	return sum / float64(len(t.slowest))
}

// after is the worth of the placement after two experts have changed places, if any: the negative time in units of activations that become local.
func (t *timing) after(e, f int) float64 {
	p, q := -1, -1
	var atP, atQ float64
	if e >= 0 {
		p, q = t.rankOf[e], t.rankOf[f]
		ofE, ofF := t.weight[e*t.ranks:(e+1)*t.ranks], t.weight[f*t.ranks:(f+1)*t.ranks]
		d := t.loads[f] - t.loads[e]
		atP = max(t.sent[p], t.computed[p]+d) - t.local[p] + float64(ofE[p]-ofF[p])
		atQ = max(t.sent[q], t.computed[q]-d) - t.local[q] + float64(ofF[q]-ofE[q])
	}
	busiest, sum := max(t.busiest.except(p, q), atP, atQ), t.exchanged
	if e >= 0 {
		sum += atP + atQ - t.exchange(p) - t.exchange(q)
	}
	// In activations: a share on every rank is all of them.
	exchange := (1-t.clock.Softness)*busiest*float64(t.ranks) + t.clock.Softness*sum
	return -exchange - t.unit*t.clock.computing(t.load(e, f))
}

// leastTimeGain is the smallest gain of a swap, as a share of all activations: searches for less take long and gain nothing on later requests.
const leastTimeGain = 1e-5

func (t *timing) gain(e, f int) float64 { return t.after(e, f) - t.value - leastTimeGain*t.total }

func (t *timing) swap(e, f int) {
	t.value = t.after(e, f)
	p, q, experts := t.rankOf[e], t.rankOf[f], len(t.rankOf)
	moved := t.loads[f] - t.loads[e]
	t.computed[p], t.computed[q] = t.computed[p]+moved, t.computed[q]-moved
	t.local[p] += float64(t.weight[f*t.ranks+p] - t.weight[e*t.ranks+p])
	t.local[q] += float64(t.weight[e*t.ranks+q] - t.weight[f*t.ranks+q])
	for w := range len(t.windows) / experts {
		d := float64(t.windows[w*experts+f] - t.windows[w*experts+e])
		t.on[w*t.ranks+p] += d
		t.on[w*t.ranks+q] -= d
	}
	t.rankOf[e], t.rankOf[f] = q, p
	t.rank()
}

// lar is the local activation rate, and imbalance the largest load of a rank over the mean, in the profile.
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
