// SPDX-License-Identifier: Apache-2.0

// Package probe checks whether an engine that serves under a plan produces the same outputs as without a plan. A
// plan may change where work is done, but not what is computed. Engines have shipped with expert maps that are used to
// load weights but ignored at dispatch. Such an engine produces fluent but wrong text, while every health check passes.
//
// A fixed set of prompts is sent to an engine without a plan, and its answers are stored. An engine with a plan answers
// the same prompts, on every rank, before it gets traffic. The log-probabilities of the prompts' tokens and of a short
// greedy continuation are compared.
//
// Two correct engines differ in bfloat16. Judge applies a test statistic. docs/lossless-probe.md states its false-refusal rate
// and its power.
//
// Invariants:
//   - The comparison is a pure function, separate from the requests to engines.
//   - Only an answer of the engine can be a difference. Requests that the engine does not answer are retried.
//   - If no token could be compared, the engine has not passed.
package probe
