package simulate

// served is a request on its way.
type served struct {
	*Request
	// arrival is in microseconds.
	arrival float64
	// computed tokens have gone through the model, produced ones are those of the output; first and last are when the first and the latest of
	// these were there.
	computed, produced int
	first, last        float64
	// query is what the present step computes.
	query int
}

// room is what the cache keeps for a request.
func (s *served) room() int { return s.Prompt + s.Output }

// lane is a batch of its own: of a rank (attention DP), or of all (TP).
type lane struct {
	waiting, running []*served
	// free is the room of the cache.
	free int
	// stepTokens and mostRunning are its bounds.
	stepTokens, mostRunning int
	// outstanding are the tokens of its requests that have not ended, with what a router expects of their outputs.
	outstanding int64
	// next are the tokens of the prompts that a router knows to be in the next step: those that it has sent since a step last answered one.
	next int64
}

// batch decides on what a step computes: a token of each request whose output has begun, and then prompts, in the order of their arrival, in
// parts that fit what is left of the step. It returns the number of tokens.
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
	for left > 0 && len(l.waiting) > 0 && len(l.running) < l.mostRunning && l.waiting[0].room() <= l.free {
		s := l.waiting[0]
		l.waiting = l.waiting[1:]
		l.free -= s.room()
		s.query = min(left, s.Prompt)
		left -= s.query
		l.running = append(l.running, s)
	}
	return l.stepTokens - left
}

// finish notes at the end of a step what it has computed, and tells of each token that is there, and each request that has ended.
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
