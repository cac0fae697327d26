// SPDX-License-Identifier: Apache-2.0

// Package router implements the request router. As a proxy, it forwards the OpenAI and native routes of the engines to
// engine ranks. As an endpoint picker, it selects ranks for a gateway (package picker).
//
// A request passes through stages, which stages.go lists and forwarder.go calls in order:
//
//	read      request_reader.go     properties of the request, from one scan of its body
//	score     forecast.go           tokens, expected local share by rank, hashes of the prefixes;
//	                                observed_prefixes.go: what ranks have cached by KV events
//	queue     wait_queue.go         wait for the rank of the experts, if the policy allows it
//	reserve   reservation.go        a rank of a pod, chosen by rank_selection.go, as a lease; place_queue.go waits for one
//	sample    sampler.go            request for the routed experts, within a memory budget
//	send      engine_request.go     the body for the reserved rank
//	record    outcome.go            load, failures and times
//	rewrite   response_rewriter.go  routed experts that the client did not request, or with other ids
//
// Requests about a stored response go to the pod that stores it (stored_responses.go).
//
// The endpoint picker (endpoint_picker.go) calls the same stages, but a gateway sends the request.
//
// Package discovery lists the engine pods and package plans loads the tables of each plan, into the pool of backends.
// The other subpackages: wire parses and edits request and response bodies, client handles client connections, exchange
// the connections to engines, tokenize asks engines for token ids, livesamples stores the tokens of sampled requests,
// kvevents reads what engines have cached, waitqueue queues requests that wait for a rank, breaker decides when failing backends get no requests, clientauth checks the API keys of clients, tlsfiles provides TLS
// configurations, telemetry records single requests, balance measures the load balance of the ranks, reports exports
// observations as metrics, and managerauth authenticates the managers that read observations.
//
// Invariants:
//   - An endpoint is a (pod, rank). Every ready pod is admitted. A pod with a deletion timestamp gets no new request.
//   - A request is scored only with the tables of the plan that its pod serves under, or of a plan with the same placement.
//     It is counted only by that placement. Until the plan of a pod is loaded, its requests are balanced by load and not
//     counted.
//   - The plan is chosen before the rank, at random. A plan therefore cannot attract the requests that suit it. Clients
//     choose neither the plan nor whether a request is sampled.
//   - No lock is held while a prompt is tokenized, scored or hashed, and the scored part of a prompt is bounded.
//   - A request is retried on another pod only while no part of a response has reached the client.
//   - A request counts once in the prices and occupies one rank at a time, however often it is sent. Its place is always
//     released.
//   - A request waits for a place only in a queue of bounded size and for a bounded time. While a request waits that could
//     take a free place, no request that is after it in the order takes one.
//   - Clients cannot choose a rank: rank headers and the rank members of bodies are dropped.
//   - A rank is reported to clients, and counted, only if the engine was observed to read the rank on the route and no
//     response has contradicted it.
//   - Serving requires neither the API server nor the operator nor the artifact store. The last known endpoints and plans
//     are kept in memory and in a directory, from which a restarted router starts.
//   - Experts are reported and counted by logical id, regardless of their order in the checkpoint of a pod.
//   - Observations and live samples are served only to clients with a certificate of the managers' authority.
//   - With API keys, a request without a valid key is rejected before its body is read. Engines get no key of a client.
//   - Only the routes of the engines' tables (engine.APIs) and of PassThrough are proxied. Administrative routes of an
//     engine are unreachable.
package router
