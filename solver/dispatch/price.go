package dispatch

import "math"

const (
	// priceStep is the rise of a rank's price for one request of mean size, as a fraction of the mean lead of a request's
	// best rank: models differ in how far their scores spread. It holds at stepCap, and shrinks by stepExponent as the cap leaves
	// more room. Between .1 and .25 locality differs by half a percent at stepCap; at a cap of 1.25, where it is .08, .15 would cost
	// 0.5%.
	priceStep, stepCap, stepExponent = 0.15, 1.15, 1.2
	// leastStep and mostStep bound it: prices must settle within a few hundred requests however far the cap, and must not swing
	// however near.
	leastStep, mostStep = 0.05, 0.3
	// earlyStep is how much larger the step is for the first request; it falls with e to the number of requests over
	// earlyRequests. Prices that begin at nothing have far to go, which is worth 0.2 to 0.3% of locality over 1,100 requests.
	earlyStep, earlyRequests = 2, 64
	// patientStep is what a step is of that where requests wait: they keep off a rank that has had much, and prices have less to do. At 1 they
	// wait a fifth less, and half a percent less is local; at a half they wait longer for nothing.
	patientStep = 2. / 3
	// windowStep is the part of a price that follows the excess of the rank's load over the last requests, in price steps for
	// 30% of it: what is about to hit the cap is kept for those that gain most.
	windowStep = 1 / 0.3
)

// stepOf is the price step under a cap.
func stepOf(loadCap float64) float64 {
	return min(max(priceStep*math.Pow((stepCap-1)/max(loadCap-1, 1e-9), stepExponent), leastStep), mostStep)
}

// lead is the mean lead of a request's best rank over the mean of all ranks.
func (s *Scheduler) lead() float64 { return s.spreads / max(s.scored, 1) }

// price is a rank's, in local shares.
func (s *Scheduler) price(rank int) float64 {
	if s.policy != Price {
		return 0
	}
	return s.prices[rank] + windowStep*s.step*s.lead()*s.recent.excess(rank, s.shares[rank])
}

// raise lets the price of the chosen rank follow its load; the mean of the prices of ranks in line stays. Requests without a
// forecast have load, and no say in what a lead is.
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
	// A rank that gets nothing because it has stopped answering is not cheaper for that.
	open := 0.0
	for i, inLine := range s.inLine {
		if inLine {
			open += s.shares[i]
		}
	}
	for i, inLine := range s.inLine {
		if inLine {
			s.prices[i] -= rise * s.shares[i] / open
		}
	}
}

// spread is the lead of the best score over the mean.
func spread(scores []float32) float64 {
	best, sum := scores[0], float64(0)
	for _, score := range scores {
		best = max(best, score)
		sum += float64(score)
	}
	return float64(best) - sum/float64(len(scores))
}
