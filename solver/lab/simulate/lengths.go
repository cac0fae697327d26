// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
)

// Lengths is a distribution of the number of tokens of prompts or outputs.
type Lengths struct {
	kind string
	a, b float64
}

// The kinds of lengths.
const (
	recordedLengths    = "trace"
	fixedLengths       = "fixed"
	uniformLengths     = "uniform"
	exponentialLengths = "exp"
	lognormalLengths   = "lognormal"
)

// maxTokens is the maximum drawn length: with an unlimited tail, a single request would dominate a run.
const maxTokens = 1 << 17

// LengthsUsage describes the syntax of ParseLengths.
const LengthsUsage = "trace (as recorded), N, uniform:MIN:MAX, exp:MEAN or lognormal:MEDIAN:SIGMA"

// Recorded uses the lengths of the trace's requests.
var Recorded = Lengths{kind: recordedLengths}

// ParseLengths parses a distribution (see LengthsUsage).
func ParseLengths(text string) (Lengths, error) {
	if text == recordedLengths {
		return Recorded, nil
	}
	words := strings.Split(text, ":")
	if len(words) == 1 {
		words = []string{fixedLengths, text}
	}
	numbers := make([]float64, len(words)-1)
	for i, word := range words[1:] {
		var err error
		if numbers[i], err = strconv.ParseFloat(word, 64); err != nil || math.IsNaN(numbers[i]) || numbers[i] > maxTokens {
			return Lengths{}, fmt.Errorf("%q in lengths %q must be a number of at most %d", word, text, maxTokens)
		}
	}
	l := Lengths{kind: words[0], a: numbers[0]}
	switch {
	case len(numbers) == 1 && (l.kind == fixedLengths && l.a == math.Trunc(l.a) || l.kind == exponentialLengths) && l.a >= 1:
		return l, nil
	case len(numbers) == 2 && l.kind == uniformLengths && l.a >= 1 && numbers[1] >= l.a && l.a == math.Trunc(l.a) && numbers[1] == math.Trunc(numbers[1]):
		l.b = numbers[1]
		return l, nil
	case len(numbers) == 2 && l.kind == lognormalLengths && l.a >= 1 && numbers[1] >= 0 && numbers[1] <= 4:
		l.b = numbers[1]
		return l, nil
	}
	return Lengths{}, fmt.Errorf("lengths %q are invalid: allowed is %s, with numbers of at least 1 and SIGMA from 0 to 4", text, LengthsUsage)
}

// draw returns one length, at least 1; recorded is the length of the trace's request.
func (l Lengths) draw(random *rand.Rand, recorded int) int {
	n := l.a
	switch l.kind {
	case recordedLengths:
		return recorded
	case uniformLengths:
		n = l.a + float64(random.IntN(int(l.b-l.a)+1))
	case exponentialLengths:
		// Rounding up raises the mean by about 0.5.
		n = math.Ceil(random.ExpFloat64() * max(l.a-0.5, 0.5))
	case lognormalLengths:
		n = math.Round(l.a * math.Exp(l.b*random.NormFloat64()))
	}
	return int(min(max(n, 1), maxTokens))
}
