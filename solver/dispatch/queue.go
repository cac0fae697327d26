package dispatch

import "github.com/semmoe/operator/solver/assign"

// QueuePerRank is the number of queued requests per rank that the window policy decides on at once.
const QueuePerRank = 4

// Queue is the window policy: it assigns queues of requests exactly.
type Queue struct {
	ranks    int
	solver   assign.Solver
	scores   []float32
	capacity []int
}

// NewQueue returns a queue for that many ranks.
func NewQueue(ranks int) *Queue { return &Queue{ranks: ranks, capacity: make([]int, ranks)} }

// Size is the number of requests that Assign is meant to be given.
func (q *Queue) Size() int { return q.ranks * QueuePerRank }

// Assign returns the ranks with the highest sum of scores under which no rank has more requests than its share, rounded
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
