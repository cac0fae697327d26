// SPDX-License-Identifier: Apache-2.0

package dispatch

import "github.com/semmoe/operator/solver/assign"

// queuePerRank is the number of queued requests per rank that the window policy assigns together.
const queuePerRank = 4

// Queue implements the window policy: it assigns queues of requests optimally.
type Queue struct {
	ranks    int
	solver   assign.Solver
	scores   []float32
	capacity []int
}

// NewQueue returns a queue for the given number of ranks.
func NewQueue(ranks int) *Queue { return &Queue{ranks: ranks, capacity: make([]int, ranks)} }

// Size returns the intended number of requests of an Assign call.
func (q *Queue) Size() int { return q.ranks * queuePerRank }

// Assign returns the ranks with the highest sum of scores such that no rank gets more requests than its share, rounded
// up. The result is valid until the next call.
func (q *Queue) Assign(requests []Request) []int {
	q.scores = q.scores[:0]
	for _, r := range requests {
		q.scores = append(q.scores, r.Scores[:q.ranks]...)
	}
	for i := range q.capacity {
		q.capacity[i] = (len(requests) + q.ranks - 1) / q.ranks
	}
	return q.solver.Assign(q.scores, q.capacity)
}
