// SPDX-License-Identifier: Apache-2.0

package bound

// envelope is the smallest concave function of a row's concentration that bounds the row's largest share, for rows of k
// activations of one each. Such rows are distributed in integers: six activations on six ranks have a largest share of
// 1/6, whereas arbitrary shares would allow nearly twice as much at the same concentration.
type envelope struct{ vertices []vertex }

// vertex is a concentration with the largest share at this concentration.
type vertex struct{ at, share float64 }

// newEnvelope returns the envelope for rows of k activations, on ranks with at most the number most each.
func newEnvelope(k, ranks, most int) *envelope {
	e := &envelope{}
	for largest := (k + ranks - 1) / ranks; largest <= min(k, most); largest++ {
		// The smallest concentration with this largest number: the rest is spread evenly over the other ranks.
		squares, left, others := largest*largest, k-largest, ranks-1
		each, more := left/others, left%others
		squares += more*(each+1)*(each+1) + (others-more)*each*each
		e.add(vertex{float64(squares) / float64(k*k), float64(largest) / float64(k)})
	}
	return e
}

// add appends a vertex, to the right of all others, and drops vertices that are then below the envelope.
func (e *envelope) add(v vertex) {
	for n := len(e.vertices); n >= 2; n-- {
		a, b := e.vertices[n-2], e.vertices[n-1]
		if (b.share-a.share)*(v.at-a.at) > (v.share-a.share)*(b.at-a.at) {
			break
		}
		e.vertices = e.vertices[:n-1]
	}
	e.vertices = append(e.vertices, v)
}

// tangent returns the line through the envelope at a concentration, as a point and a slope. The line is nowhere below
// the envelope. At a vertex it is the line to the right.
func (e *envelope) tangent(sigma float64) (value, slope, at float64) {
	last := len(e.vertices) - 1
	if last == 0 || sigma >= e.vertices[last].at {
		return e.vertices[last].share, 0, e.vertices[last].at
	}
	i := 0
	for i+1 < last && sigma >= e.vertices[i+1].at {
		i++
	}
	a, b := e.vertices[i], e.vertices[i+1]
	return a.share, (b.share - a.share) / (b.at - a.at), a.at
}
