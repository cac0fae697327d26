// Package calibration measures what the cost models of an MoE layer are fitted to, on the user's own GPUs: it carries a
// script that needs nothing but the PyTorch of an inference engine, runs it on this machine or in a Job, follows its
// progress and reads its result.
//
// Invariant: a result is passed on whole, as the script has written it, or not at all.
package calibration
