// Package router is the request router: it proxies the OpenAI and native routes of the engines to their ranks, or chooses ranks for a
// gateway that does (package picker).
//
// Package discovery tells it which pods there are, package plans what each plan says of a request. It is itself the pool, which takes
// a place for each request, the ways that requests go by, and what is observed of them. Package wire reads and edits what is on its
// way, package client minds the connections of clients, package tokenize asks engines for tokens, package livesamples keeps those of
// sampled requests, package line those that wait for a rank, package balance how even the ranks are, and package reports makes metrics of what is observed.
// Package managerauth authenticates the managers that read observations.
//
// Invariants:
//   - An endpoint is a (pod, rank). Every ready pod is admitted; a pod that is being deleted gets no new request.
//   - A request is scored only with the tables of the plan that its pod serves under, or of one with the same placement, and
//     counted only by that placement. While a pod's plan is not at hand, its requests are balanced by load and not counted.
//   - The plan is chosen before the rank, at random, so that no plan gets the requests that suit it. Clients can choose neither the plan
//     nor whether a request is sampled.
//   - No lock is held while a prompt is tokenized or scored, and what is scored of a prompt is bounded.
//   - A request is tried again on another pod only as long as nothing of a response has reached the client.
//   - A request counts once in prices and on one place at a time, however often it is sent. Its place is given back whatever
//     becomes of it.
//   - Clients cannot choose a rank: their rank headers and the rank members of their bodies are dropped.
//   - A rank is reported to clients, and counted, only where the engine was seen to read it on the route, and no answer has contradicted it.
//   - Serving needs neither the API server nor the operator nor the artifact store: the last known endpoints and plans
//     are kept in memory and in a directory, from which a restarted router starts.
//   - Experts are told and counted by their logical ids, whatever the order in which a pod's checkpoint has them.
//   - Observations and live samples are served only to clients with a certificate of the managers' authority.
//   - Only inference routes are proxied. An engine's administrative routes stay unreachable.
package router
