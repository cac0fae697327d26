// SPDX-License-Identifier: Apache-2.0

package engine

// StepMetrics names the metrics with which an engine counts its steps and their tokens. The ranks have series with
// different labels.
type StepMetrics struct {
	// Histogram is a histogram of the tokens per step of a rank. Running is a gauge of the requests of the rank that
	// are being computed. A step with more tokens than running requests computes prompts.
	Histogram, Running string
	// OneServer is a metric that is absent if several servers share a pod's engine. In this case there are as many
	// servers as ranks, each server counts only the part of a step for its own requests, and the histogram contains
	// these parts. It is empty for engines that count whole steps.
	OneServer string
	// Steps and Tokens are counters, for engines without a histogram. Kind is their label that distinguishes prefill
	// from decode.
	Steps, Tokens, Kind string
	Prefill, Decode     StepKind
	// Requirement describes the setting that is required to export the metrics. It is empty if they are exported by default.
	Requirement string
}

// StepKind contains the values of StepMetrics.Kind for one kind of steps: Steps is a prefix of the label values in the
// counter of steps, Tokens the value in the counter of tokens.
type StepKind struct{ Steps, Tokens string }

// CountsSteps reports whether the engine has a supported metric of its steps.
func (a Adapter) CountsSteps() bool { return a.StepMetrics != nil }
