// SPDX-License-Identifier: Apache-2.0

package simulate

// served is a request in service.
type served struct {
	*Request
	// arrival is in microseconds.
	arrival float64
	// computed is the number of tokens that have passed through the model, produced the number of output tokens. first
	// and last are the times of the first and the latest output token.
	computed, produced int
	first, last        float64
	// query is the number of tokens in the current step.
	query int
}

// room returns the number of tokens that the cache reserves for a request.
func (s *served) room() int { return s.Prompt + s.Output }

// lane is a separate batch: of one rank (attention DP), or of all ranks (TP).
type lane struct {
	waiting, running []*served
	// free is the free capacity of the cache, in tokens.
	free int
	// stepTokens and maxRunning are the limits of a step's tokens and of running requests.
	stepTokens, maxRunning int
	// outstanding is the number of tokens of its unfinished requests, including the assumed output.
	outstanding int64
	// next is the number of prompt tokens that the router knows to be in the next step: those sent since a step last
	// produced a response.
	next int64
}

// batch selects the tokens of a step: one for each request in decoding, then prompts in order of arrival, in chunks
// that fit the rest of the step. It returns the number of tokens.
func (l *lane) batch() int {
	left := l.stepTokens
	for _, s := range l.running {
		s.query = 0
		if s.produced > 0 && left > 0 {
			s.query = 1
			left--
		}
	}
	for _, s := range l.running {
		if s.produced == 0 {
			s.query = min(left, s.Prompt-s.computed)
			left -= s.query
		}
	}
	for left > 0 && len(l.waiting) > 0 && len(l.running) < l.maxRunning && l.waiting[0].room() <= l.free {
		s := l.waiting[0]
		l.waiting = l.waiting[1:]
		l.free -= s.room()
		s.query = min(left, s.Prompt)
		left -= s.query
		l.running = append(l.running, s)
	}
	return l.stepTokens - left
}

// finish records the results of a step and calls token for each new token, and end for each request that has ended.
func (l *lane) finish(now float64, token func(*served), end func(*served)) {
	kept := l.running[:0]
	for _, s := range l.running {
		s.computed += s.query
		if s.query > 0 && s.computed >= s.Prompt {
			s.produced++
			token(s)
			s.last = now
		}
		if s.produced < s.Output {
			kept = append(kept, s)
			continue
		}
		l.free += s.room()
		end(s)
	}
	clear(l.running[len(kept):])
	l.running = kept
}
