// Package line keeps the requests that wait until the rank of their experts has room (late binding). dispatch.Line is what evaluations have
// in its place.
//
// Invariants:
//   - Who stands in line is called, or waits for as long as its caller has patience; a line wakes nobody by itself.
//   - At most dispatch.OvertakeFactor times as many requests as make the line full pass one that waits (dispatch.MustGo).
//   - Requests stand in the order in which they came, each in one line at a time.
//   - A line is not safe for concurrent use but for Turn: the caller holds a lock.
package line
