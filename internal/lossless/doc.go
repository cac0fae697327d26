// Package lossless decides whether an engine that serves under a plan gives the outputs that it gave without one. Plans may
// change where work happens and never what is computed; but engines have shipped expert maps that they load weights by
// and forget at dispatch, and then answer fluently and wrongly, with every health check green.
//
// A fixed set of prompts is sent to an engine without a plan, and its answers are stored. A planned engine answers the same
// prompts, on every rank, before it gets traffic. The log-probabilities of the prompts' own tokens and of a short greedy
// continuation are compared.
//
// Two right engines differ in bfloat16. Judge applies the statistic; docs/lossless-probe.md has its false-refusal rate and its power.
//
// Invariants:
//   - Comparing is pure; asking engines is apart from it.
//   - Only an answer of the engine can be a difference. An engine that does not answer is asked again.
//   - Silence proves nothing: where no token could be compared, the engine has not passed.
package lossless
