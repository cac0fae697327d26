// SPDX-License-Identifier: Apache-2.0

package affinity

import "github.com/semmoe/operator/solver/trace"

// Routes returns, for every MoE layer and position of a trace, the rank that holds most of the token's experts
// [layers][T], the lowest one on ties.
func Routes(t *trace.Trace, hosts []Hosts, ranks int) [][]uint16 {
	routes := make([][]uint16, len(hosts))
	on := make([]int, ranks)
	for l := range hosts {
		routes[l] = make([]uint16, len(t.Tokens))
		for p := range t.Tokens {
			clear(on)
			for _, expert := range t.Row(p, l) {
				for _, rank := range hosts[l][expert] {
					on[rank]++
				}
			}
			best := 0
			for rank, n := range on {
				if n > on[best] {
					best = rank
				}
			}
			routes[l][p] = uint16(best)
		}
	}
	return routes
}
