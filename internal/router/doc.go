// Package router is the request router: it proxies the OpenAI and native routes of the engines to their ranks.
//
// Invariants:
//   - An endpoint is a (pod, rank). Every ready pod is admitted; a pod that is being deleted gets no new request.
//   - A request is tried again on another pod only as long as nothing of a response has reached the client.
//   - Clients cannot choose a rank: their rank headers are dropped.
//   - Serving needs neither the API server nor the operator: the last known endpoints are kept in memory and in a
//     snapshot file, from which a restarted router starts.
//   - Only inference routes are proxied. An engine's administrative routes stay unreachable.
package router
