// SPDX-License-Identifier: Apache-2.0

// Package faults injects realistic faults between a manager and the API server.
//
// Faults are injected into HTTP requests, below the client and the cache. A manager cannot distinguish them from real
// faults, and every request to the API server passes through the injector, including reads of the cache, retries and
// events. A seed and the number of the request select the faults, so that a schedule is reproducible.
//
// # Kinds of faults
//
//   - Intermediate state: the manager crashes at its k-th write. The API server executes that write, and the manager
//     sends no further request.
//   - Stale state: the cache lags behind by k of the manager's own writes. The first lists of a restarted manager are
//     equally old, and later events arrive with a delay.
//   - Unobserved state: watches break, and their resource versions have expired when the manager reconnects. The
//     manager must list again, so that it sees all changes in between as one change, or not at all.
//   - Errors: conflicts, 429 with Retry-After, 500 and 503, and requests that time out before or after their execution.
//
// Dump and Journal record the effect of the faults. Dump returns the remaining objects without fields that differ
// between any two runs. Journal counts how often each object was created and deleted.
package faults
