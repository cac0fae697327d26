// Package dispatch decides, online and from forecast scores alone, which rank serves a request (attention data
// parallelism) or a token (attention tensor parallelism).
//
// Invariants:
//   - A decision depends on the requests seen so far, never on later ones; the window policy sees the queue that it is
//     given and nothing else, the late policy those that stand in line.
//   - No request in line is passed by more than OvertakeFactor times as many as make it full.
//   - Deciding for one request allocates nothing and takes time proportional to the number of places.
//   - What speaks for a place is in microseconds saved; how far each component counts is a weight, and 1 is as modelled.
//   - A shuffle moves a batch's tokens and changes none: Resume undoes Rebatch, and every rank has exactly its share.
//   - Load is counted in tokens. Every policy answers with a rank, whatever the scores and loads are.
//   - Schedulers are not safe for concurrent use; the caller holds a lock.
package dispatch
