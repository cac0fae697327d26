// SPDX-License-Identifier: Apache-2.0

package dispatch

import "math"

const (
	// priceStep is the price increment of a rank for one request of mean size, as a fraction of the mean lead of a
	// request's best rank, because models differ in the spread of their scores. The value applies at the cap stepCap
	// and shrinks with stepExponent as the cap leaves more room. Between .1 and .25, locality at stepCap differs by
	// 0.5%. At a cap of 1.25, where the step is .08, a step of .15 would cost 0.5%.
	priceStep, stepCap, stepExponent = 0.15, 1.15, 1.2
	// minStep and maxStep bound the step: prices must settle within a few hundred requests for any loose cap, and must
	// not oscillate for any tight cap.
	minStep, maxStep = 0.05, 0.3
	// earlyStep is the relative enlargement of the step for the first request; it decays exponentially with constant
	// earlyRequests. Prices start at 0 and have far to go; this is worth 0.2 to 0.3% of locality over 1,100 requests.
	earlyStep, earlyRequests = 2, 64
	// patientStep is the factor of the step if requests wait: waiting requests avoid an overloaded rank, so prices have
	// less to do. At 1, requests wait a fifth less and locality is 0.5% lower. At 0.5, they wait longer without
	// benefit.
	patientStep = 2. / 3
	// windowStep scales the price component that follows the excess of the rank's load over the last requests, in price
	// steps per 30% excess. It keeps a rank that nears its cap for the requests that gain most.
	windowStep = 1 / 0.3
)

// stepOf returns the price step under a cap.
func stepOf(loadCap float64) float64 {
	return min(max(priceStep*math.Pow((stepCap-1)/max(loadCap-1, 1e-9), stepExponent), minStep), maxStep)
}

// lead returns the mean lead of a request's best rank over the mean of all ranks.
func (s *Scheduler) lead() float64 { return s.spreads / max(s.scored, 1) }

// price returns a rank's price, in local shares.
func (s *Scheduler) price(rank int) float64 {
	if s.policy != Price {
		return 0
	}
	return s.prices[rank] + windowStep*s.step*s.lead()*s.recent.excess(rank, s.shares[rank])
}

// raise raises the price of the chosen rank with its load and lowers the prices of all ranks marked notAhead, so that
// their mean stays constant. Requests without a forecast count as load but do not affect the mean lead.
func (s *Scheduler) raise(rank, tokens int, scores []float32) {
	if scores != nil {
		s.scored++
		s.spreads += spread(scores[:len(s.prices)])
	}
	s.sizes += float64(tokens)
	s.sized++
	if s.sizes == 0 {
		return
	}
	early := 1 + earlyStep*math.Exp(-(s.sized-1)/earlyRequests)
	rise := early * s.step * s.lead() * float64(tokens) / (s.sizes / s.sized)
	s.prices[rank] += rise
	// The price of a rank that stopped answering, and receives no load, does not fall.
	open := 0.0
	for i, notAhead := range s.notAhead {
		if notAhead {
			open += s.shares[i]
		}
	}
	for i, notAhead := range s.notAhead {
		if notAhead {
			s.prices[i] -= rise * s.shares[i] / open
		}
	}
}

// spread returns the lead of the best score over the mean.
func spread(scores []float32) float64 {
	best, sum := scores[0], float64(0)
	for _, score := range scores {
		best = max(best, score)
		sum += float64(score)
	}
	return float64(best) - sum/float64(len(scores))
}
