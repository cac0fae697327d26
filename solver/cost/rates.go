// SPDX-License-Identifier: Apache-2.0

package cost

// Rates are the figures by which placements are compared.
type Rates struct{ LAR, RemoteRanksPerToken, RemoteNodesPerToken float64 }

// Rates returns the rates of all requests.
func (r *Report) Rates() Rates { return Rates{r.LAR, r.RemoteRanksPerToken, r.RemoteNodesPerToken} }

// sums are the cumulative counts over the layers of an arrival order.
type sums struct{ activations, local, remoteRanks, remoteNodes int }

func (r *orderRun) sums() (s sums) {
	for _, t := range r.tallies {
		s.activations += t.activations
		s.local += t.local
		s.remoteRanks += t.remoteRanks
		s.remoteNodes += t.remoteNodes
	}
	return s
}

// since returns the rates of the counts after before.
func (s sums) since(before sums, topK int) Rates {
	activations := float64(s.activations - before.activations)
	rows := activations / float64(topK)
	return Rates{
		LAR:                 float64(s.local-before.local) / activations,
		RemoteRanksPerToken: float64(s.remoteRanks-before.remoteRanks) / rows,
		RemoteNodesPerToken: float64(s.remoteNodes-before.remoteNodes) / rows,
	}
}

// byRequest returns the means over the orders for each of the requests.
func byRequest(orders []*orderRun, requests []int) []Rates {
	index := make(map[int]int, len(requests))
	for i, request := range requests {
		index[request] = i
	}
	means := make([]Rates, len(requests))
	weight := 1 / float64(len(orders))
	for _, run := range orders {
		for at, request := range run.order {
			mean, rates := &means[index[request]], run.rates[at]
			mean.LAR += weight * rates.LAR
			mean.RemoteRanksPerToken += weight * rates.RemoteRanksPerToken
			mean.RemoteNodesPerToken += weight * rates.RemoteNodesPerToken
		}
	}
	return means
}
