// SPDX-License-Identifier: Apache-2.0

package assign

import "math"

// follower keeps every item on its best bin while prices change step by step. A step moves few items: each item stores
// how far prices may change before another bin can be better, and is re-evaluated only then.
type follower struct {
	w *Weighted
	// bins are the items' best bins, loads the bins' loads, and local the sum of the items' scores there.
	bins  []int32
	loads []float64
	local float64
	// lowest is the sum, over all steps, of each step's minimum price change, so every price has changed by at least
	// lowest since the first step. An item stays while the price of its bin minus lowest is below until: its bin's
	// price has then risen, relative to the others, by less than the item's lead.
	lowest float64
	until  []float64
	reach  []float64
}

// takeAll evaluates every item.
func (f *follower) takeAll(prices Prices) {
	items, bins := len(f.w.Sizes), len(f.w.Limits)
	f.bins, f.until = resized(f.bins, items), resized(f.until, items)
	f.loads, f.reach = resized(f.loads, bins), resized(f.reach, bins)
	clear(f.loads)
	f.local, f.lowest = 0, 0
	at := f.w.at(prices)
	for item, size := range f.w.Sizes {
		bin, lead := at.best(item, 0)
		f.settle(item, bin, lead, prices)
		f.loads[bin] += float64(size)
		f.local += f.w.score(item, bin)
	}
}

// follow re-evaluates the items that a step may move. change contains the change of each price.
func (f *follower) follow(prices Prices, change []float64) {
	lowest := change[0]
	for _, c := range change[1:] {
		lowest = min(lowest, c)
	}
	f.lowest += lowest
	for bin, price := range prices {
		f.reach[bin] = price - f.lowest
	}
	bins, at := f.bins, f.w.at(prices)
	for item, until := range f.until[:len(bins)] {
		from := int(bins[item])
		if until > f.reach[from] {
			continue
		}
		to, lead := at.best(item, from)
		f.settle(item, to, lead, prices)
		if to != from {
			f.move(item, from, to)
		}
	}
}

func (f *follower) settle(item, bin int, lead float64, prices Prices) {
	f.bins[item] = int32(bin)
	if size := float64(f.w.Sizes[item]); size > 0 {
		f.until[item] = lead/size + prices[bin] - f.lowest
	} else {
		// Prices do not affect items of size 0.
		f.until[item] = math.Inf(1)
	}
}

func (f *follower) move(item, from, to int) {
	size := float64(f.w.Sizes[item])
	f.loads[from] -= size
	f.loads[to] += size
	f.local += f.w.score(item, to) - f.w.score(item, from)
}

// value returns the relaxed value at the last prices.
func (f *follower) value(prices Prices) float64 {
	value := f.local
	for bin, price := range prices {
		value += price * (f.w.Limits[bin] - f.loads[bin])
	}
	return value
}
