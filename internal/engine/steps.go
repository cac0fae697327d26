package engine

// StepMetrics names the metrics by which an engine counts its steps and the tokens that they compute. Ranks have series that differ in labels.
type StepMetrics struct {
	// Histogram is a histogram of the tokens of the steps of a rank, and Running a gauge of the requests of the rank that are being computed: a
	// step with more tokens than these computes prompts.
	Histogram, Running string
	// OneServer is a metric that is absent where several servers share a pod's engine. There are as many as ranks then, each counts the part of a
	// step that is of its own requests, and the histogram has the parts. Empty stands for engines whose steps are counted whole.
	OneServer string
	// Steps and Tokens are counters where there is no histogram. Kind is their label whose values tell prefill from decode.
	Steps, Tokens, Kind string
	Prefill, Decode     StepKind
	// Needs says what to set for the engine to export them; empty where it does by default.
	Needs string
}

// StepKind has the values of StepMetrics.Kind for one kind of steps: of the counters of steps all that begin with Steps, of those of tokens Tokens.
type StepKind struct{ Steps, Tokens string }

// CountsSteps reports whether the engine counts its steps by a metric that is read.
func (a Adapter) CountsSteps() bool { return a.StepMetrics != nil }
