// Package faults stands between a manager and the API server, and lets go wrong what goes wrong there in earnest.
//
// It works below the client and the cache, on HTTP requests: a manager cannot tell its faults from real ones, and all that it
// says to the API server goes through them, reads of the cache, retries and events included. Faults are chosen by a seed and
// the number of the request, so that a schedule can be run again.
//
// # What can go wrong
//
//   - Intermediate state: the manager dies with its k-th write. That write is done; nothing of it is heard again.
//   - Stale state: the cache lags behind by k of the manager's own writes, lists of a restarted manager are as old as that, and
//     what was missed comes late.
//   - Unobserved state: watches break, and when they may be opened again they are too old to go on. Only a new list tells what
//     is there: all that happened between is merged into one change, or was never seen.
//   - Refusals: conflicts, 429 with Retry-After, 500 and 503, and requests that time out: before they were done, or after.
//
// Dump and Journal say what became of it: what is left, without what differs between any two runs, and how often each object
// was made and deleted on the way.
package faults
